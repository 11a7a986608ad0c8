"""Installs, starts, commands and ends vLLM, alone or over LMCache's server.

vLLM's environment is bench/engine's; LMCache lies in a separate folder, because its pins differ. Both have their best
settings on a CPU: LMCache's multi-process server, LMCacheMPConnector, L2 by its native file-system adapter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent / "engine"))

import sides  # noqa: E402

from loadtest.stack import free_ports  # noqa: E402

FOLDER = ROOT / ".cache" / "bench-lmcache"
#: Installed without dependencies; vLLM's environment has the rest.
PINNED = (
    "lmcache==0.5.6", "sortedcontainers==2.4.0", "aiofile==3.12.3", "aiofiles==25.1.0", "caio==0.12.10",
    "awscrt==0.38.1",
    "nvtx==0.2.17", "py-cpuinfo==9.0.0", "redis==8.1.0", "opentelemetry-exporter-prometheus==0.61b0",
)  # fmt: skip
LONGEST_TOKENS = 8192
#: Flags of /proc/cpuinfo. Without any, vLLM emulates bfloat16, and float32 prefills several times as fast.
_BFLOAT16 = ("avx512_bf16", "amx_bf16")
_START_S = 120.0


def vllm_type() -> str:
    """vLLM's fastest type on this processor."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return "bfloat16" if any(name in flags for name in _BFLOAT16) else "float32"


def environment() -> tuple[Path, Path]:
    """(vLLM's interpreter, LMCache's folder), made if missing. Raises sides.NoPeer."""
    python = sides.environment()
    done, wanted = FOLDER / "installed", "\n".join(PINNED)
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(FOLDER, ignore_errors=True)
        try:
            subprocess.run(
                [str(python), "-m", "pip", "install", "-q", "--no-deps", "--target", str(FOLDER), *PINNED], check=True
            )
        except subprocess.CalledProcessError as e:
            raise sides.NoPeer(
                f"LMCache cannot be installed: status {e.returncode}; --no-peers measures our side alone"
            ) from e
        done.write_text(wanted)
    return python, FOLDER


class Peer:
    """A vLLM process. chunk_tokens: over its own LMCache server. disk: with LMCache's disk tier."""

    def __init__(
        self,
        name: str,
        model: Path,
        threads: int,
        scratch: Path,
        chunk_tokens: int = 0,
        l1_gib: int = 2,
        disk: Path | None = None,
    ) -> None:
        python, folder = environment()
        self.name, self.disk = name, disk
        self._server: subprocess.Popen[bytes] | None = None
        port = 0
        if chunk_tokens:
            port = free_ports(2)
            self._http = port + 1
            self._serve(python, folder, port, chunk_tokens, l1_gib, scratch / f"{name}-lmcache.log")
        cores = sorted(os.sched_getaffinity(0))[:threads]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
            "PYTHONPATH": str(folder) if chunk_tokens else "",
            "LD_PRELOAD": str(sides.ENVIRONMENT / "lib" / "libiomp5.so"),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(sides.ENVIRONMENT / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(sides.ENVIRONMENT / "cache" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        said: dict[str, Any] = {
            "model": str(model),
            "longest": LONGEST_TOKENS,
            "lmcache_port": port,
            "dtype": vllm_type(),
        }
        try:
            self._side = sides.Side(name, [str(python), str(HERE / "vllm_side.py")], env, said, scratch / f"{name}.log")
        except BaseException:
            self.close()
            raise
        self.versions: dict[str, Any] = self._side.ready

    def _serve(self, python: Path, folder: Path, port: int, chunk_tokens: int, l1_gib: int, log: Path) -> None:
        command = [
            str(python), "-c", "from lmcache.cli.main import main; main()", "server", "--host", "127.0.0.1", "--port",
            str(port),
            "--http-host", "127.0.0.1", "--http-port", str(self._http), "--chunk-size", str(chunk_tokens),
            "--l1-size-gb", str(l1_gib),
            "--l1-init-size-gb", str(l1_gib), "--no-l1-use-lazy", "--eviction-policy", "LRU",
            "--supported-transfer-mode", "engine_driven",
        ]  # fmt: skip
        if self.disk is not None:
            self.disk.mkdir(parents=True)
            command += [
                "--l2-adapter",
                json.dumps({"type": "fs_native", "base_path": str(self.disk), "num_workers": 4}),
            ]
        env = os.environ | {"PYTHONPATH": str(folder), "LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
        with log.open("wb") as out:
            self._server = subprocess.Popen(command, stdout=out, stderr=out, env=env)
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                self._http_call("GET", "/healthcheck")
                return
            except OSError:
                time.sleep(0.3)
        self.close()
        raise RuntimeError(f"LMCache's server did not start: {log.read_text()[-1500:]}")

    def _http_call(self, method: str, path: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self._http}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10):
            pass

    def turn(self, prompt: list[int]) -> float:
        """Seconds to the first token."""
        return self._side.ask("turn", prompt=prompt)

    def cached(self) -> int:
        """Cached tokens of the last turn."""
        return int(self._side.ask("cached"))

    def forget(self) -> None:
        """Empty vLLM's cache, not LMCache's."""
        self._side.ask("forget")

    def forget_memory(self) -> None:
        """Empty LMCache's memory too; its disk stays."""
        self.forget()
        self._http_call("POST", "/cache/clear")

    def files(self) -> list[Path]:
        """LMCache's files on disk."""
        return [path for path in self.disk.rglob("*") if path.is_file()] if self.disk else []

    def close(self) -> None:
        """End both processes."""
        if hasattr(self, "_side"):
            self._side.close()
        if self._server is not None:
            self._server.terminate()
            try:
                self._server.wait(10)
            except subprocess.TimeoutExpired:
                self._server.kill()
                self._server.wait()
