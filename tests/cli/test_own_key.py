"""`upbeat up` beyond loopback without configured keys: it makes one, says so, and everything else works with it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from stand_in_stack import UpbeatUp

from cli.own_key import kept_key, path_of
from contracts.api_keys import digest, is_hashed
from contracts.errors import ConfigError
from runtime.config_file import load_config

MODEL = Path(__file__).parents[2] / "models" / "demo"
#: Loopback too, but not one of its names that need no key: nobody else can reach these tests.
BEYOND = {"UPBEAT__GATEWAY__HOST": "127.0.0.2"}
_EXPORT = re.compile(r"export UPBEAT_API_KEY=(upb-[A-Za-z0-9_-]{43})")


def test_the_key_is_printed_and_kept_and_the_same_at_the_next_start(up: UpbeatUp) -> None:
    launcher = up.serving(BEYOND)
    printed = _EXPORT.findall(up.said())
    assert len(printed) == 1 and f'-H "authorization: Bearer {printed[0]}"' in up.said()
    file = up.directory / "data" / "api_key"
    assert (file.read_text().strip(), stat.S_IMODE(file.stat().st_mode)) == (printed[0], 0o600)
    secrets = up.run_dir / "secrets" / "upbeat-gateway.yaml"
    written = load_config(up.run_dir / "config.yaml", secrets=secrets).gateway.api_keys
    assert [is_hashed(k.key) for k in written] == [True] and bytes.fromhex(written[0].key[7:]) == digest(printed[0])
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait(timeout=40) == 0
    up.serving(BEYOND)
    assert _EXPORT.findall(up.said()) == printed * 2


def test_configured_keys_are_the_only_ones(up: UpbeatUp) -> None:
    up.serving(BEYOND | {"UPBEAT__GATEWAY__API_KEYS": '[{"key": "a-key-of-somebody-with-enough-characters"}]'})
    assert "export UPBEAT_API_KEY" not in up.said() and "$UPBEAT_API_KEY" in up.said()
    assert "a-key-of-somebody" not in up.said() and not (up.directory / "data" / "api_key").exists()


def test_on_loopback_nobody_needs_one(up: UpbeatUp) -> None:
    up.serving()
    assert "UPBEAT_API_KEY" not in up.said() and not (up.directory / "data" / "api_key").exists()


def test_a_gateway_that_is_started_by_hand_still_refuses(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    kept_key(tmp_path / "data")
    environment = os.environ | {"UPBEAT__GATEWAY__HOST": "0.0.0.0", "UPBEAT__DATA": str(tmp_path / "data")}
    done = subprocess.run(
        [sys.executable, "-m", "gateway"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "gateway.api_keys" in done.stderr and "Traceback" not in done.stderr


def test_doctor_makes_no_key(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("upbeat")), "doctor", "--json", "--data", str(tmp_path / "data")]
    environment = os.environ | BEYOND | {"UPBEAT__WORKER__KERNELS": "torch"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1) and json.loads(done.stdout)["findings"], done.stderr
    assert not path_of(tmp_path / "data").exists()


def test_a_key_that_cannot_be_kept_stops_the_start_and_says_why(tmp_path: Path) -> None:
    path_of(tmp_path).mkdir()
    with pytest.raises(ConfigError, match=r"api_key.*gateway\.api_keys"):
        kept_key(tmp_path)


def _get(url: str, key: str = "") -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        return e.code, e.read()


@pytest.mark.stack
def test_a_real_stack_asks_for_its_key_and_the_printed_commands_work(up: UpbeatUp) -> None:
    up.serving(BEYOND, bin_dir=None, model=MODEL)
    url, key = f"http://127.0.0.2:{up.port}", kept_key(up.directory / "data")
    assert _get(f"{url}/v1/models")[0] == 401 and _get(f"{url}/v1/models", key)[0] == 200
    assert _get(f"{url}/")[0] == 200, "the playground comes, and asks for the key"
    pasted = next(line for line in up.said().splitlines() if line.startswith("  try ")).removeprefix("  try").strip()
    done = subprocess.run([*shlex.split(pasted), "-s"], capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["choices"], done
    command = [str(Path(sys.executable).with_name("upbeat")), "status", "--url", url]
    with_key = subprocess.run(
        command, env=os.environ | {"UPBEAT_API_KEY": key}, capture_output=True, text=True, timeout=60, check=False
    )
    without = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert with_key.returncode == 0, with_key
    assert without.returncode == 4 and "UPBEAT_API_KEY" in without.stderr
