"""vLLM's side of bench/engine: its engine in this process, answering `protocol.py`'s commands, in vLLM's environment.

Compiled mode, prefix cache and token budget are vLLM's defaults. Scheduling, sampling and output processing run as
usual, without detokenisation. Long contexts get synthetic KV from vLLM's connector for decode benchmarks.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import torch
from protocol import MOST_NEW_TOKENS, arguments, prompt, serve

SETTINGS = arguments()
if SETTINGS["avx2"]:  # vLLM reads these when it chooses a library of its wheel, on import
    for ability in (
        "_is_avx512_supported",
        "_is_avx512_bf16_supported",
        "_is_amx_tile_supported",
        "_is_amx_fp16_supported",
    ):
        setattr(torch.cpu, ability, lambda: False)

from vllm import LLM, SamplingParams  # noqa: E402
from vllm import __version__ as version  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

#: The value of synthetic keys and values.
MADE_UP = 0.015


class Theirs:
    """An engine and its requests. A method returns the seconds it took."""

    def __init__(self, settings: dict[str, Any]) -> None:
        more: dict[str, Any] = {}
        if settings["made_up"]:
            more["kv_transfer_config"] = KVTransferConfig(
                kv_connector="DecodeBenchConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"fill_mean": MADE_UP, "fill_std": 0.0},
            )
        llm = LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            dtype=settings["peer_dtype"],
            max_model_len=settings["longest"],
            max_num_seqs=settings["max_batch"],
            disable_log_stats=True,
            seed=0,
            **more,
        )
        self._engine = llm.llm_engine
        self._vocabulary = settings["vocabulary"]
        self._count = itertools.count(1)
        self._live: list[str] = []

    def _submit(self, tokens: int, max_tokens: int) -> str:
        number = next(self._count)
        wanted = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(f"r{number}", {"prompt_token_ids": prompt(number, tokens, self._vocabulary)}, wanted)
        return f"r{number}"

    def _step(self) -> set[str]:
        """Run a step; returns the requests that gained a token."""
        return {output.request_id for output in self._engine.step() if output.outputs[0].token_ids}

    def prefill(self, tokens: int) -> float:
        """An uncached prompt, until its first token."""
        began = time.perf_counter()
        self._submit(tokens, 1)
        while not self._step():
            pass
        took = time.perf_counter() - began
        while self._engine.has_unfinished_requests():
            self._step()
        return took

    def begin(self, batch: int, context: int) -> float:
        """Prefill a batch and stop before its next step."""
        began = time.perf_counter()
        self._live = [self._submit(context, MOST_NEW_TOKENS) for _ in range(batch)]
        silent = set(self._live)
        while silent:
            silent -= self._step()
        return time.perf_counter() - began

    def decode(self, steps: int) -> float:
        """`steps` steps of the whole batch, timed from the end of the step before them."""
        self._step()
        began = time.perf_counter()
        for _ in range(steps):
            if len(self._step()) != len(self._live):
                raise RuntimeError("a sequence was left out of a step")
        return time.perf_counter() - began

    def end(self) -> float:
        """Abort the batch and wait until it is gone."""
        self._engine.abort_request(self._live)
        while self._engine.has_unfinished_requests():
            self._step()
        return 0.0


def main() -> None:
    theirs = Theirs(SETTINGS)
    does = {"prefill": theirs.prefill, "begin": theirs.begin, "decode": theirs.decode, "end": theirs.end}
    libraries = {
        line.rpartition("/")[2] for line in Path("/proc/self/maps").read_text().splitlines() if "/vllm/_C" in line
    }
    serve(does, {"vllm": version, "vllm_dtype": SETTINGS["peer_dtype"], "vllm_library": ", ".join(sorted(libraries))})


if __name__ == "__main__":
    main()
