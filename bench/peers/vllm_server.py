"""vLLM's OpenAI server, in the environment of its own: `python vllm_server.py` takes the flags of vllm.entrypoints.openai.api_server.

The `vllm` program does not find its package's metadata in the CPU wheel, so the module is run. vLLM walks over every object of every
module that is loaded, and stumbles over those of llvmlite that LMCache's imports bring: they are hidden meanwhile, here and in the engine
(and by bench/returning_session_tiers, which has vLLM in a process of its own).
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def spare_llvmlite() -> None:
    """Hide llvmlite's modules while vLLM looks for its kernels."""
    from vllm.triton_utils import dispatcher

    rebind = dispatcher._rebind_kernels

    def rebind_others(kernels: Any) -> None:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("llvmlite")}
        try:
            rebind(kernels)
        finally:
            sys.modules.update(hidden)

    dispatcher._rebind_kernels = rebind_others


if __name__ == "__main__":
    # The engine's process is a fork of this one, so that it is patched too.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    spare_llvmlite()
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
