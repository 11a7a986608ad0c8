"""vLLM's router as a target: one address in front of the servers of another target.

https://github.com/vllm-project/router, from PyPI with pinned versions, in an environment of its own. Its policies get a
session's id in the header X-Session-Id.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".cache" / "bench-router" / "bin" / "python"
REQUIREMENTS = HERE / "router-requirements.txt"
#: The router's policies that know sessions or load: by prefix while load is even, by session, by session and load, by
#: load.
POLICIES = ("cache_aware", "consistent_hash", "sticky_least_loaded", "power_of_two")


class NoRouter(RuntimeError):
    """The router cannot be installed. The message says why."""


def environment() -> Path:
    """The router's interpreter, installed if missing. Raises NoRouter."""
    if not PYTHON.exists():
        pip = [str(PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-deps"]
        for command in ([sys.executable, "-m", "venv", str(PYTHON.parents[1])], [*pip, "-r", str(REQUIREMENTS)]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                PYTHON.unlink(missing_ok=True)
                raise NoRouter(f"vLLM's router: {' '.join(command[:4])} …: {done.stderr[-1000:]}")
    return PYTHON


def before(target: dict[str, Any], policy: str, *, python: Path | None = None) -> dict[str, Any]:
    """`target`, whose last programs are servers, with the router before them. python: its interpreter."""
    *others, servers = target["start"]
    urls = [f"http://127.0.0.1:${{port_{servers['name']}_{n}}}" for n in range(servers["count"])]
    at = "http://127.0.0.1:${port}"
    routing = {
        "name": "router",
        "command": [
            str(python or environment()), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", "${port}",
            "--prometheus-port", "${port2}", "--policy", policy, "--worker-urls", *urls,
        ],
        "ready": f"{at}/health",
        "ready_s": 60,
        "serves": at,
    }  # fmt: skip
    versions = target.get("versions", {}) | {"vllm-router": "0.1.17"}
    return target | {"start": [*others, servers | {"serves": ""}, routing], "versions": versions}
