"""vLLM's OpenAI server, run in vLLM's environment with the flags of vllm.entrypoints.openai.api_server.

Runs the module because the `vllm` program does not find its package's metadata in the CPU wheel. vLLM inspects every
object of every loaded module and fails on llvmlite's, which LMCache imports. They are hidden during that inspection,
here, in the engine's process, and by bench/returning_session_tiers.
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
    # Fork the engine's process, so that the patch applies there too.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    spare_llvmlite()
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
