"""A model by its hub id, from a real hub server on loopback: what is downloaded, what is refused, and what an
interruption leaves."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.random_model import SHAPES, make_random_model
from runtime.model_config import load_config
from worker.models.checkpoint import Checkpoint

from .hub_server import HubServer, files_of, in_shards

ROOT = Path(__file__).parents[2]
PROGRAM = (
    "import sys; from contracts.errors import ConfigError; from runtime.model_directory import model_directory\n"
    "try: print(model_directory(sys.argv[1], '--model'))\n"
    "except ConfigError as e: print(e, file=sys.stderr); sys.exit(2)"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small model that can be served."""
    shape, dtype = SHAPES["tiny"]
    return files_of(make_random_model(tmp_path_factory.mktemp("tiny"), shape, 1, dtype))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    made = HubServer()
    yield made
    made.close()


class Client:
    """A process that asks for a model, as every command does, with a cache of its own."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.cache = home / "hub"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.environment = kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}

    def ask(self, model: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        home = Path(self.environment["HF_HOME"])
        home.mkdir(exist_ok=True)
        command = [*prefix, sys.executable, "-c", PROGRAM, model]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=120,
            env=self.environment | environment,
            cwd=home,
            check=False,
        )

    def get(self, model: str, **environment: str) -> Path:
        done = self.ask(model, **environment)
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    def refusal(self, model: str, **environment: str) -> str:
        done = self.ask(model, **environment)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr.strip().splitlines()[-1]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 40
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    return Client(hub, tmp_path / "home")


@pytest.mark.parametrize("sharded", [False, True])
def test_what_serving_needs_is_downloaded_and_nothing_else(
    hub: HubServer, client: Client, tiny: dict[str, bytes], sharded: bool
) -> None:
    needed = in_shards(tiny) if sharded else tiny
    other = {
        "README.md": b"x",
        "pytorch_model.bin": b"x" * 99,
        "consolidated.safetensors": b"x" * 99,
        "tf_model.h5": b"x",
    }
    commit = hub.add("acme/tiny", needed | other)
    directory = client.get("acme/tiny")
    assert directory.name == commit and files_of(directory) == needed
    assert not hub.asked("README|pytorch_model|consolidated|tf_model")
    assert load_config(directory).layers == 4
    assert Checkpoint(directory).tensors


def test_a_second_start_downloads_nothing_and_a_commit_asks_nobody(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    commit = hub.add("acme/tiny", tiny)
    first = client.get("acme/tiny")
    hub.requests.clear()
    assert client.get("acme/tiny") == first
    assert hub.requests and not hub.asked("GET /(store|acme)")
    hub.requests.clear()
    assert client.get(f"acme/tiny@{commit}") == first
    assert not hub.requests


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    old = hub.add("acme/tiny", tiny, revision="v1")
    new = hub.add("acme/tiny", tiny | {"generation_config.json": b"{}"})
    assert client.get("acme/tiny@v1").name == old
    hub.requests.clear()
    assert client.get("acme/tiny").name == new
    assert not hub.asked("GET /store"), "weights that both revisions have come once"
    said = client.refusal("acme/tiny@v9")
    assert "--model acme/tiny@v9" in said and "no such revision" in said and "a tag" in said


def test_without_the_hub_the_copy_is_used(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/tiny", tiny)
    directory = client.get("acme/tiny")
    asked = len(hub.requests)
    assert client.get("acme/tiny", HF_HUB_OFFLINE="1") == directory
    assert len(hub.requests) == asked
    assert client.get("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9") == directory
    hub.fails = 500
    done = client.ask("acme/tiny")
    assert done.stdout.strip() == str(directory) and "using the copy" in done.stderr


def test_without_the_hub_and_a_copy_the_remedy_is_said(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    said = client.refusal("acme/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert "http://127.0.0.1:9 failed" in said and "HF_ENDPOINT" in said and "give a directory" in said
    assert "HF_HUB_OFFLINE" in client.refusal("acme/tiny", HF_HUB_OFFLINE="1")
    hub.add("acme/tiny", tiny)
    (client.get("acme/tiny") / "model.safetensors").unlink()
    assert "no whole copy" in client.refusal("acme/tiny", HF_HUB_OFFLINE="1")


def test_a_connection_that_breaks_goes_on_where_it_broke(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    hub.add("acme/tiny", tiny)
    hub.breaks_after, hub.breaks = 100_000, 2
    assert files_of(client.get("acme/tiny")) == tiny
    assert [headers.get("range") for _, _, headers in hub.asked("GET /store")] == [
        None,
        "bytes=100000-",
        "bytes=200000-",
    ]


def test_a_process_that_was_ended_leaves_the_beginning_to_the_next(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    hub.add("acme/tiny", tiny)
    hub.breaks_after, hub.breaks, hub.stalls = 200_000, 1, True
    client.cache.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "acme/tiny"], env=client.environment, cwd=client.cache)
    until(lambda: sum(part.stat().st_size for part in client.cache.rglob("*.incomplete")) > 0)
    process.terminate()
    process.wait(timeout=20)
    [partial] = client.cache.rglob("*.incomplete")
    kept = partial.stat().st_size
    assert 0 < kept <= 200_000
    hub.requests.clear()
    assert files_of(client.get("acme/tiny")) == tiny
    assert [headers.get("range") for _, _, headers in hub.asked("GET /store")] == [f"bytes={kept}-"]
    assert not partial.exists()


def test_a_hub_that_breaks_off_at_once_is_given_up(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/tiny", tiny)
    hub.breaks = 1_000_000
    said = client.refusal("acme/tiny")
    assert "failed" in said and "start again to go on" in said


def test_a_store_without_ranges_sends_all_of_it_again(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/tiny", tiny)
    hub.breaks_after, hub.breaks, hub.no_ranges = 100_000, 1, True
    assert files_of(client.get("acme/tiny")) == tiny


def test_bytes_that_are_not_the_models_are_thrown_away(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/tiny", tiny)
    hub.flips = True
    assert "not what the hub names" in client.refusal("acme/tiny")
    assert not list(client.cache.rglob("*.incomplete"))
    hub.flips = False
    assert files_of(client.get("acme/tiny")) == tiny


def test_two_processes_download_it_once(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/tiny", tiny)
    client.cache.mkdir(parents=True)
    command = [sys.executable, "-c", PROGRAM, "acme/tiny"]
    both = [
        subprocess.Popen(command, env=client.environment, cwd=client.cache, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = {process.communicate(timeout=120)[0].strip() for process in both}
    assert len(said) == 1 and files_of(Path(said.pop())) == tiny
    assert len(hub.asked("GET /store")) == 1


def test_a_token_is_sent_to_the_hub_and_to_nobody_else(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/private", tiny, token="hf_right")
    said = client.refusal("acme/private")
    assert "no such model, or it is private" in said and "hf auth login" in said and "HF_TOKEN" in said
    assert "no such model, or it is private" in client.refusal("acme/private", HF_TOKEN="hf_other")
    assert "refuses the token" in client.refusal("acme/private", HF_TOKEN="hf_wrong")
    client.cache.parent.joinpath("token").write_text("hf_right")  # as `hf auth login` leaves it
    assert files_of(client.get("acme/private")) == tiny
    assert all("authorization" not in headers for _, _, headers in hub.asked("/store/"))


def test_a_gated_model_names_the_page_with_its_terms(hub: HubServer, client: Client, tiny: dict[str, bytes]) -> None:
    hub.add("acme/gated", tiny, token="hf_right", gated=True)
    for token in ({}, {"HF_TOKEN": "hf_other"}):
        said = client.refusal("acme/gated", **token)
        assert "gated" in said and f"{hub.url}/acme/gated" in said and "hf auth login" in said
    assert files_of(client.get("acme/gated", HF_TOKEN="hf_right")) == tiny


def test_the_disk_is_looked_at_before_anything_large_comes(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    hub.add("acme/tiny", tiny)
    hub.told_sizes["model.safetensors"] = 1 << 60
    said = client.refusal("acme/tiny")
    assert "GiB of disk are needed" in said and "are free" in said and "HF_HOME" in said
    assert not hub.asked("/store/")


def changed_config(tiny: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    return tiny | {"config.json": json.dumps(json.loads(tiny["config.json"]) | changes).encode()}


@pytest.mark.parametrize(
    ("changes", "named", "server"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM", "--engine vllm"),
        ({"architectures": ["BertModel"]}, "BertModel", "Text Embeddings Inference"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "Whisper", "faster-whisper"),
        ({"quantization_config": {"quant_method": "awq", "bits": 3}}, "bits = 3", "--engine vllm"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes", "--engine vllm"),
        (
            {"quantization_config": {"bits": 4, "group_size": 64}, "quantization": {"bits": 4}},
            "quantization_config",
            "mlx-lm",
        ),
    ],
)
def test_a_kind_that_is_not_served_is_refused_before_its_weights_come(
    hub: HubServer, client: Client, tiny: dict[str, bytes], changes: dict[str, object], named: str, server: str
) -> None:
    hub.add("acme/other", changed_config(tiny, **changes))
    said = client.refusal("acme/other")
    assert "--model acme/other: config.json" in said and named in said and server in said
    assert not hub.asked("/store/")


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"model-Q4_K_M.gguf": b"GGUF"}, "llama.cpp"),
        ({"model_index.json": b"{}"}, "diffusers"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "merge it into its base model"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, "pickles"),
        (
            {
                "config.json": b'{"architectures": ["T5ForConditionalGeneration"]}',
                "model.safetensors": b"",
                "spiece.model": b"",
            },
            "T5",
        ),
    ],
)
def test_files_that_are_no_model_for_us(hub: HubServer, client: Client, files: dict[str, bytes], named: str) -> None:
    hub.add("acme/other", files)
    assert named in client.refusal("acme/other")
    assert not hub.asked("/store/")


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_come(
    hub: HubServer, client: Client, tiny: dict[str, bytes]
) -> None:
    hub.add("acme/other", {name: content for name, content in tiny.items() if name != "tokenizer.json"})
    assert "no tokenizer.json" in client.refusal("acme/other")
    assert not hub.asked("/store/")


def test_a_terminal_sees_a_bar_and_a_log_one_line(
    hub: HubServer, client: Client, tiny: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("acme/tiny", tiny)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", PROGRAM, "acme/tiny"]
    environment = client.environment | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment, cwd=tmp_path)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the terminal is gone when the process is
        while some := os.read(ours, 4096):
            seen += some
    os.close(ours)
    assert process.wait(timeout=20) == 0
    assert "━" in seen.decode() and "MB" in seen.decode(), seen
    shutil.rmtree(client.cache)
    [line] = client.ask("acme/tiny").stderr.strip().splitlines()
    assert line.startswith("upbeat: downloading acme/tiny (0.00 GiB")
