"""What `make dist` builds, installed from the files alone: no checkout, no make."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".cache" / "release" / "bin" / "python"
#: From the end of the installation, with the CPU kernels to compile.
FIRST_TOKEN_S = 60.0
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("UPBEAT", "PYTHON"))}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes."""
    if shutil.which("npm") is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("release") / "dist"
    done = subprocess.run(
        [str(TOOLS), str(ROOT / "deploy" / "release.py"), "build", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def environment(path: Path) -> Path:
    """A new environment's Python."""
    subprocess.run([sys.executable, "-m", "venv", str(path)], check=True)
    return path / "bin" / "python"


def run(*command: object, folder: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=CLEAN,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def test_every_package_is_built_in_one_version(dist: Path) -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    names = ("upbeat_server", "upbeat_sdk", "upbeat_vllm")
    assert {path.name for path in dist.glob("*.whl")} == {f"{name}-{version[1]}-py3-none-any.whl" for name in names}
    assert {path.name for path in dist.glob("*gz")} == {
        f"upbeat_server-{version[1]}.tar.gz",
        f"upbeat_sdk-{version[1]}.tar.gz",
        f"upbeat-web-{version[1]}.tgz",
    }


def test_the_wheel_has_the_kernels_sources_the_pages_and_the_demo_model(dist: Path) -> None:
    (wheel,) = dist.glob("upbeat_server-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("worker/kernels/cpu", "worker/memory/host", "kvstore/tiers/native", "gateway/playground"):
        sources = {str(path.relative_to(ROOT)) for path in (ROOT / folder).iterdir() if path.is_file()}
        assert sources and sources <= inside
    assert {f"gateway/web_sdk/{path.name}" for path in (ROOT / "web-sdk" / "dist").iterdir()} <= inside
    assert "models/demo/model.safetensors" in inside
    assert not any(name.startswith(("tests/", "bench/")) for name in inside)


def test_sboms_name_all_that_is_pinned_with_its_hashes(dist: Path) -> None:
    listed = json.loads((dist / "upbeat-server.cdx.json").read_text())["components"]
    found = {
        (each["name"].lower(), each["version"]): {
            hash_["content"] for ref in each["externalReferences"] for hash_ in ref.get("hashes", [])
        }
        for each in listed
    }
    text = (ROOT / "constraints.txt").read_text().replace("\\\n", "")
    pinned = {
        (name.lower(), version): set(re.findall(r"sha256:([0-9a-f]{64})", line))
        for line in text.splitlines()
        for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", line)
    }
    assert len(pinned) > 100 and found == pinned
    web = json.loads((dist / "upbeat-web.cdx.json").read_text())["components"]
    packages = json.loads((ROOT / "web-sdk" / "package-lock.json").read_text())["packages"]
    locked = {(path.rpartition("node_modules/")[2], each["version"]) for path, each in packages.items() if path}
    assert locked and {(each["name"], each["version"]) for each in web} == locked


def test_from_the_wheel_alone_a_stack_answers_within_a_minute(dist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    # The dependencies as pinned, torch in this machine's build; then the package from its file, all it asks for there.
    run(python, ROOT / "deploy" / "install.py", "serve", folder=tmp_path)
    run(python, "-m", "pip", "install", "--no-index", "--find-links", dist, "upbeat-server[serve]", folder=tmp_path)
    installed = time.monotonic()
    where = run(python, "-c", "import cli, worker; print(cli.__file__, worker.__file__)", folder=tmp_path)
    assert all(path.startswith(str(tmp_path)) for path in where.split())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] % 20_000 + 20_000
    log = (tmp_path / "log").open("w")
    up = subprocess.Popen(
        [str(python.with_name("upbeat")), "up", "--port", str(port)],
        cwd=tmp_path,
        env=CLEAN | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert up.poll() is None and time.monotonic() < installed + 300, (tmp_path / "log").read_text()
            try:
                if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        model = httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"]
        said = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        reply = httpx.post(f"{url}/v1/chat/completions", json=said, timeout=60)
        took_s = time.monotonic() - installed
        print(f"\nfirst answer {took_s:.1f} s after the installation")
        assert reply.json()["choices"][0]["message"]["content"]
        assert took_s < FIRST_TOKEN_S
        assert httpx.get(f"{url}/upbeat.js", timeout=10).status_code == 200
        assert list((tmp_path / "cache" / "upbeat" / "kernels").glob("cpu-*.so")), "the kernels were compiled"
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)


def test_sdks_and_the_connector_are_imported_from_their_packages(dist: Path, tmp_path: Path) -> None:
    python = environment(tmp_path / "env")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", *dist.glob("upbeat_[sv][dl]*.whl"), folder=tmp_path)
    assert "upbeat" in run(python, "-c", "import upbeat; print(upbeat.__name__)", folder=tmp_path)
    run(python, "-c", "import upbeat_vllm, contracts, storelink", folder=tmp_path)
    (web,) = dist.glob("upbeat-web-*.tgz")
    run("npm", "install", "--silent", "--no-audit", "--no-fund", "--offline", web, folder=tmp_path)
    found = run(
        "node",
        "--input-type=module",
        "-e",
        "import * as web from 'upbeat-web'; console.log(Object.keys(web))",
        folder=tmp_path,
    )
    assert "attach" in found
