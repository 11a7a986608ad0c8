"""Secrets reach the services that need them, in files that only this user reads: no environment and no command line of
any of them, no file of the others, and no message has one. And logs name sessions by hashes."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from stand_in_stack import UpbeatUp
from upbeat_here import upbeat

from cli.core.secrets import blob_options, hub_token, is_secret, passed_on
from cli.log_lines import Line, of_request, of_session, read
from contracts.cluster import log_key
from contracts.errors import ConfigError
from runtime.config_file import cluster_secret, dump_config, load_config
from runtime.secret_settings import public, secrets_of
from runtime.telemetry import hashed_id

KEY = "the-key-of-somebody-with-enough-characters"
TOKEN_SECRET = "what-signs-the-tokens-of-browsers-and-is-long"
#: What is found in the environment of whoever starts a stack, and is nobody else's.
ENVIRONMENT = {
    "HF_TOKEN": "hf_a-token-of-hugging-face",
    "AWS_SECRET_ACCESS_KEY": "the-secret-key-of-the-bucket",
    "AWS_SESSION_TOKEN": "the-session-of-the-bucket",
    "OPENAI_API_KEY": "sk-of-another-service",
    "UPBEAT_API_KEY": "upb-of-the-command-line",
    "GITHUB_TOKEN": "ghp-of-a-forge",
}
BUCKET = {"aws_access_key_id": "AKIA-of-the-bucket", "aws_secret_access_key": "the-other-secret-of-the-bucket"}
SECRETS = [KEY, TOKEN_SECRET, *ENVIRONMENT.values(), *BUCKET.values()]


def test_no_process_of_a_stack_shows_a_secret_and_each_has_its_own_in_a_file(up: UpbeatUp) -> None:
    file = up.directory / "given.yaml"
    keys = [{"key": KEY, "tenant": "a"}]
    file.write_text(
        yaml.safe_dump(
            {
                "gateway": {"api_keys": keys, "token_secret": TOKEN_SECRET},
                "kv": {"blob_url": "s3://bucket/kv", "blob_options": BUCKET},
            }
        )
    )
    launcher = up.serving(ENVIRONMENT, config=file)
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) >= 5, "the services, and what writes their logs"
    for process in children:
        shown = Path(f"/proc/{process.pid}/environ").read_bytes() + Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert not [secret for secret in SECRETS if secret.encode() in shown], process.cmdline()
    secrets = up.run_dir / "secrets"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    told = {written.name: written.read_text() for written in secrets.iterdir()}
    assert all(stat.S_IMODE(written.stat().st_mode) == 0o600 for written in secrets.iterdir())
    assert set(told) == {"upbeat-gateway.yaml", "upbeat-kvstore.yaml", "hub_token"}
    in_gateway = load_config(up.run_dir / "config.yaml", secrets=secrets / "upbeat-gateway.yaml").gateway
    assert in_gateway.token_secret == TOKEN_SECRET and KEY not in told["upbeat-gateway.yaml"], "of keys, hashes suffice"
    assert yaml.safe_load(told["upbeat-kvstore.yaml"]) == {"kv": {"blob_options": BUCKET}}
    commands = {process.cmdline()[1].rpartition("/")[2]: process.cmdline() for process in children if process.cmdline()}
    with_secrets = {name for name, words in commands.items() if "--secrets" in words}
    assert with_secrets == {"upbeat-gateway", "upbeat-kvstore"}
    for written in up.run_dir.rglob("*"):
        if written.is_file() and written.parent != secrets:
            content = written.read_bytes()
            assert not [secret for secret in SECRETS if secret.encode() in content], written
    assert not [secret for secret in SECRETS if secret in up.said()]


# ---- the decision ----------------------------------------------------------------------------------------------------
def test_the_public_configuration_has_the_tenants_and_no_credential() -> None:
    keys = [{"key": "short-key", "tenant": "a"}, {"key": KEY, "tenant": "b"}]
    settings = {"gateway": {"host": "0.0.0.0", "api_keys": keys, "token_secret": TOKEN_SECRET}}
    config = load_config(None, settings | {"kv": {"blob_options": BUCKET}, "vllm": {"api_key": "of-the-server"}})
    shown = dump_config(public(config))
    assert not [secret for secret in (*SECRETS, "short-key", "of-the-server") if secret in shown]
    again = load_config(None, yaml.safe_load(shown)).gateway
    assert [key.tenant for key in again.api_keys] == ["a", "b"] and len({key.key for key in again.api_keys}) == 2
    assert not {key.key for key in again.api_keys} & {key.key for key in config.gateway.api_keys}
    assert secrets_of("upbeat-sidecar", config) == {"vllm": {"api_key": "of-the-server"}}
    for program in ("upbeat-scheduler", "upbeat-worker", "upbeat-vllm-server"):
        assert secrets_of(program, config) == {}
    assert secrets_of("upbeat-gateway", load_config(None, {})) == {}


def test_a_secret_in_a_wrong_setting_is_not_printed() -> None:
    for wrong in (
        {"gateway": {"token_secret": "too-short-secret"}},
        {"kv": {"blob_options": {"aws_secret_access_key": ["too-short-secret"]}}},
        {"kv": {"blob_options": "too-short-secret"}},
        {"vllm": {"api_key": ["too-short-secret"]}},
    ):
        with pytest.raises(ConfigError) as e:
            load_config(None, wrong)
        assert "too-short-secret" not in str(e.value) and "(not shown)" in str(e.value)


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        *((name, value, True) for name, value in ENVIRONMENT.items()),
        ("AWS_ACCESS_KEY_ID", "AKIA", True),
        ("DB_PASSWORD", "x", True),
        ("AZURE_STORAGE_ACCOUNT_KEY", "x", True),
        ("my_secret", "x", True),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/here", False),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/gone", True),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/here", False),
        ("HF_TOKEN_PATH", "/here", False),
        ("AWS_REGION", "eu", False),
        ("PATH", "/bin", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("HF_TOKEN", "", False),
    ],
)
def test_what_is_a_secret(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value, lambda path: path == "/here") is secret
    assert (name in passed_on({name: value}, lambda path: path == "/here")) is not secret


def test_a_buckets_credentials_come_from_the_environment_unless_they_are_configured() -> None:
    found = {"aws_access_key_id": "AKIA", "aws_secret_access_key": "s", "aws_session_token": "t"}
    environment = {name.upper(): value for name, value in found.items()} | {"AWS_REGION": "eu", "HF_TOKEN": "h"}
    assert blob_options("s3://bucket", {}, environment) == found
    assert blob_options("s3://bucket", {"region": "eu"}, environment) == found | {"region": "eu"}
    for said in (BUCKET, {"access_key_id": "other", "secret_access_key": "x"}):
        assert blob_options("s3://bucket", said, environment) == said, "never a mixture of two"
    assert blob_options("file:///data", {}, environment) == blob_options("", {}, environment) == {}
    assert blob_options("az://c", {}, {"AZURE_STORAGE_ACCOUNT_KEY": "k"}) == {"azure_storage_account_key": "k"}
    assert hub_token({"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "h"}) == "h" and hub_token({}) == ""


# ---- logs ------------------------------------------------------------------------------------------------------------
LOGS = """
from runtime.telemetry import configure_logs, logger
from contracts.cluster import log_key
import sys
configure_logs(sys.argv[1], "debug", lambda: log_key(b"a" * 32) if sys.argv[2] == "known" else b"")
log = logger("test")
log.info("answered", request="chatcmpl-" + 24 * "0", session="acme/chat-of-alice", user="alice", tokens=3)
log.debug("looked at", session="acme/chat-of-alice")
log.warning("failed", request="chatcmpl-" + 24 * "0" + "-0")
log.info("answered", request="chatcmpl-" + 24 * "1", session="acme/chat-of-bob")
"""


def lines_of(service: str, known: str) -> list[dict[str, object]]:

    done = subprocess.run([sys.executable, "-c", LOGS, service, known], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_sessions_and_users_are_hashes_in_logs_and_the_same_in_every_service() -> None:
    one, other, alone = (lines_of(*said) for said in (("gateway", "known"), ("worker-0", "known"), ("gateway", "")))
    key = log_key(b"a" * 32)
    assert one[0]["session"] == other[0]["session"] == hashed_id(key, "acme/chat-of-alice") != one[3]["session"]
    assert str(one[0]["session"]).startswith("acme/#") and one[0]["user"] == hashed_id(key, "alice")
    assert (one[0]["request"], one[0]["tokens"]) == ("chatcmpl-" + 24 * "0", 3)
    assert one[1]["session"] == "acme/chat-of-alice", "for debugging"
    for lines in (one, other, alone):
        assert not [line for line in lines if line["level"] != "debug" and "alice" in str(line)]
    assert alone[0]["session"] != one[0]["session"] and alone[0]["session"] != alone[3]["session"]


def test_a_session_is_found_in_the_logs_by_its_name(tmp_path: Path) -> None:
    config = load_config(None, {"data": str(tmp_path / "data"), "run_dir": str(tmp_path / "run")})
    key, folder = log_key(cluster_secret(config.data)), config.run_dir / "logs"
    folder.mkdir(parents=True)
    alice, bob = (hashed_id(key, f"default/{name}") for name in ("alice", "bob"))
    said = [
        ("gateway.log.1", {"timestamp": "1", "session": alice, "request": "chatcmpl-" + 24 * "0"}),
        ("gateway.log", {"timestamp": "4", "session": bob, "request": "chatcmpl-" + 24 * "1"}),
        ("worker-0.log", {"timestamp": "2", "request": "chatcmpl-" + 24 * "0" + "-0~2", "event": "moved"}),
        ("kvstore-0.log", {"timestamp": "3", "session": "default/alice", "level": "debug"}),
        ("kvstore-0.log", {"timestamp": "5", "event": "no session"}),
    ]
    for name, fields in said:
        with (folder / name).open("a") as f:
            f.write(json.dumps(fields) + "\nno JSON\n[1]\n")
    found = of_session(list(read(folder)), "default/alice", key)
    assert sorted(str(line.fields["timestamp"]) for line in found) == ["1", "2", "3"]
    flags = ["--data", str(config.data), "--run-dir", str(config.run_dir)]
    done = upbeat("logs", "--session", "alice", *flags)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["timestamp"] for line in done.stdout.splitlines()] == ["1", "2", "3"]
    everything = upbeat("logs", *flags).stdout.splitlines()
    assert len(everything) == 3 * len(said)
    assert upbeat("logs", "--session", "alice", "--tenant", "other", *flags).stdout == ""
    wrong = upbeat("logs", "--session", "a b", *flags)
    assert wrong.returncode == 2 and "--session" in wrong.stderr


def test_lines_of_a_request_are_found_by_its_own_id_and_by_its_callers() -> None:
    own = "chatcmpl-" + "0f" * 12
    ids = [
        own,
        f"{own}-0",
        f"{own}-1.r2",
        f"{own}/theirs",
        f"{own}/theirs-0.r1",
        f"{own}0",
        f"{own}/theirs2-0",
        "other/x",
    ]
    lines = [Line(request_id, {"request": request_id}) for request_id in ids] + [Line("none", {"request": 3})]
    assert [line.text for line in of_request(lines, own)] == [*ids[:5], ids[6]]
    assert [line.text for line in of_request(lines, "theirs")] == ids[3:5]
    assert [line.text for line in of_request(lines, f"{own}/theirs-0.r1")] == [ids[4]]
    assert not list(of_request(lines, ".*"))
