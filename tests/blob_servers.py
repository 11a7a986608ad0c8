"""Real object stores for tests, each a process of its own on a free loopback port.

`rclone serve s3` ignores ranges, moto's S3 server answers them, Azurite is Azure's own emulator (installed by `make
azurite`, else its tests are skipped), and GCS is reached by its XML API, which rclone's server speaks when it asks for
no signature.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path

from loadtest.stack import free_ports

_UP_S = 60.0
_AZURE_ACCOUNT = "devstoreaccount1"
#: Published with the emulator; it opens nothing else.
_AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@dataclass(frozen=True)
class BlobServer:
    """`url` and `options` are `kv.blob_url` and `kv.blob_options`; `port` is where it listens on loopback."""

    url: str
    port: int
    options: dict[str, str] = field(default_factory=dict)

    def through(self, port: int) -> BlobServer:
        """The same store, reached by another port (a proxy's). S3 only."""
        return BlobServer(self.url, port, {**self.options, "endpoint": f"http://127.0.0.1:{port}"})


def _s3_options(port: int) -> dict[str, str]:
    return {
        "endpoint": f"http://127.0.0.1:{port}",
        "access_key_id": "access",
        "secret_access_key": "secret",
        "region": "us-east-1",
    }


@contextlib.contextmanager
def rclone_s3(directory: Path, *, signed: bool = True) -> Iterator[BlobServer]:
    """`rclone serve s3`: every bucket is a directory, every range request is answered whole."""
    (directory / "bucket").mkdir(parents=True, exist_ok=True)
    port = free_ports(1)
    command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
    with _running([*command, *(["--auth-key", "access,secret"] if signed else []), str(directory)], port):
        yield BlobServer("s3://bucket/kv", port, _s3_options(port))


@contextlib.contextmanager
def moto_s3() -> Iterator[BlobServer]:
    """moto's S3 server: objects in its memory, ranges answered with 206."""
    port = free_ports(1)
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT"), timeout=20
        ).close()
        yield BlobServer("s3://bucket/kv", port, _s3_options(port))


@contextlib.contextmanager
def gcs(directory: Path) -> Iterator[BlobServer]:
    """GCS's client on a server of its XML API."""
    with rclone_s3(directory / "objects", signed=False) as server:
        account = {
            "gcs_base_url": f"http://127.0.0.1:{server.port}",
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        file = directory / "service-account.json"
        file.write_text(json.dumps(account))
        yield BlobServer("gs://bucket/kv", server.port, {"service_account": str(file)})


def azurite_command() -> str | None:
    """Azurite's blob service where it is installed."""
    own = Path(__file__).parents[1] / ".cache" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return os.environ.get("UPBEAT_TEST_AZURITE") or (str(own) if own.exists() else shutil.which("azurite-blob"))


@contextlib.contextmanager
def azurite(command: str) -> Iterator[BlobServer]:
    """Azure's emulator with one container."""
    port = free_ports(1)
    flags = [
        "--inMemoryPersistence",
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--blobPort",
        str(port),
    ]
    with _running([command, *flags], port):
        _make_container(port, "box")
        endpoint = f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}"
        yield BlobServer(
            "az://box/kv", port, {"account_name": _AZURE_ACCOUNT, "access_key": _AZURE_KEY, "endpoint": endpoint}
        )


def _make_container(port: int, name: str) -> None:
    """Azure's REST call, signed with the shared key."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n"
    resource = f"/{_AZURE_ACCOUNT}/{_AZURE_ACCOUNT}/{name}\nrestype:container"
    signature = hmac.new(
        base64.b64decode(_AZURE_KEY), f"PUT{chr(10) * 12}{headers}{resource}".encode(), hashlib.sha256
    ).digest()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{_AZURE_ACCOUNT}/{name}?restype=container", method="PUT")
    request.add_header("x-ms-date", date)
    request.add_header("x-ms-version", "2021-08-06")
    request.add_header("Authorization", f"SharedKey {_AZURE_ACCOUNT}:{base64.b64encode(signature).decode()}")
    urllib.request.urlopen(request, timeout=20).close()


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _UP_S
        while not _accepts(port):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not listen on {port}"
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0
