"""podman with what a test machine lacks: a base image without a registry, limits that this account may set."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = "localhost/upbeat-test-base:bookworm"
IMAGE = "localhost/upbeat-test:local"
_PROGRAMS = ("podman", "runc", "debootstrap")
_NPROC = 16_384
_BUNDLE = "etc/ssl/certs/ca-certificates.crt"


def need() -> None:
    """Skip the test where containers cannot be brought up."""
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        why = f"{', '.join(missing)} missing" if missing else "not root"
        pytest.skip(f"containers cannot be brought up here: {why}")


class Podman:
    """podman with settings of its own, in `scratch`."""

    def __init__(self, scratch: Path) -> None:
        files, processes = (resource.getrlimit(what)[1] for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
        processes = _NPROC if processes == resource.RLIM_INFINITY else min(processes, _NPROC)
        conf = scratch / "containers.conf"
        conf.write_text(
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]\n'
            '[engine]\nruntime = "runc"\n'
        )
        self.environment = os.environ | {"CONTAINERS_CONF": str(conf)}

    def run(self, *arguments: str, timeout_s: float = 120.0, check: bool = True) -> str:
        """What `podman ARGUMENTS` prints, errors included."""
        done = subprocess.run(
            ["podman", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            env=self.environment,
            check=False,
        )
        assert not check or done.returncode == 0, f"podman {arguments[0]}: {done.stdout[-3000:]}"
        return done.stdout

    def make_base(self) -> None:
        """Make BASE with debootstrap, unless it is there: Debian with Python and a compiler, as this machine trusts."""
        if subprocess.run(["podman", "image", "exists", BASE], check=False).returncode == 0:
            return
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch) / "root"
            wanted = "--include=python3,python3-venv,ca-certificates,g++"
            subprocess.run(
                ["debootstrap", "--variant=minbase", wanted, "bookworm", str(root)],
                check=True,
                stdout=subprocess.DEVNULL,
                timeout=900,
            )
            shutil.copy(f"/{_BUNDLE}", root / _BUNDLE)
            tar = Path(scratch) / "root.tar"
            subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True, timeout=300)
            self.run("import", "--quiet", str(tar), BASE, timeout_s=300)

    def build(self) -> float:
        """Build IMAGE from the checkout as compose.yaml does, on BASE; seconds that it took."""
        began = time.monotonic()
        arguments, mounts = _where_pip_looks()
        self.run(
            *("build", "--network", "host", "--file", str(ROOT / "deploy" / "Dockerfile"), "--target", "upbeat"),
            *("--tag", IMAGE, "--build-arg", f"BASE={BASE}", *arguments, *mounts, str(ROOT)),
            timeout_s=1500,
        )
        return time.monotonic() - began


def _where_pip_looks() -> tuple[list[str], list[str]]:
    """Build arguments for the indexes that pip is configured with here, and mounts of those that are folders."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    said = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        said[name.rpartition(".")[2]] = value.strip("'")
    arguments = ["--build-arg", f"PIP_CERT=/{_BUNDLE}"]
    mounts = []
    for key in ("index-url", "extra-index-url", "find-links"):
        if key in said:
            arguments += ["--build-arg", f"PIP_{key.upper().replace('-', '_')}={said[key]}"]
        for place in said.get(key, "").split():
            folder = Path(place.removeprefix("file://"))
            if folder.is_dir():
                # An index names files beside it.
                folder = folder.parent if folder.name == "simple" else folder
                mounts += ["--volume", f"{folder}:{folder}:ro"]
    return arguments, mounts
