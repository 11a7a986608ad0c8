"""vLLM in this process, alone or over LMCache, answering commands by bench/engine's protocol.

Runs in the peers' environment with block size 32, compiled mode and prefix cache. A turn is timed from token ids until
the step with the first token returns.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "engine"))
sys.path.append(str(Path(__file__).resolve().parent.parent / "peers"))

from protocol import arguments, serve
from vllm import LLM, SamplingParams
from vllm import __version__ as version
from vllm.config import KVTransferConfig
from vllm_server import spare_llvmlite

BLOCK_TOKENS = 32
_HELD_S = 60.0


class Peer:
    """An engine and its last turn."""

    def __init__(self, said: dict[str, Any]) -> None:
        more: dict[str, Any] = {}
        if said["lmcache_port"]:
            where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": said["lmcache_port"]}
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="LMCacheMPConnector", kv_role="kv_both", kv_connector_extra_config=where
            )
        self._llm = LLM(
            model=said["model"],
            dtype=said["dtype"],
            skip_tokenizer_init=True,
            max_model_len=said["longest"],
            max_num_seqs=8,
            block_size=BLOCK_TOKENS,
            disable_log_stats=True,
            seed=0,
            **more,
        )
        self._count = itertools.count(1)
        self._cached = 0

    def turn(self, prompt: list[int]) -> float:
        """Seconds to the first token of this prompt."""
        engine, name = self._llm.llm_engine, f"r{next(self._count)}"
        wanted = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1, detokenize=False)
        began = time.perf_counter()
        engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
        while True:
            done = [o for o in engine.step() if o.request_id == name and o.outputs[0].token_ids]
            if done:
                break
        took = time.perf_counter() - began
        self._cached = done[0].num_cached_tokens or 0
        while engine.has_unfinished_requests():
            engine.step()
        return took

    def cached(self) -> float:
        """Cached tokens of the last turn."""
        return float(self._cached)

    def forget(self) -> float:
        """Empty vLLM's prefix cache after LMCache has copied it; steps run until it has."""
        deadline = time.monotonic() + _HELD_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise RuntimeError("the prefix cache stays in use")
            self._llm.llm_engine.step()
            time.sleep(0.02)
        return 0.0


def main() -> None:
    spare_llvmlite()
    peer = Peer(arguments())
    serve({"turn": peer.turn, "cached": peer.cached, "forget": peer.forget}, {"vllm": version})


if __name__ == "__main__":
    main()
