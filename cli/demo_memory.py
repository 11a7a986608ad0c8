"""How much memory `upbeat up` gives the bundled model where nobody said: little, so that conversations push each other out.

With plenty, all that a newcomer says stays in HBM, and a hint has nothing to bring. On a GPU the general defaults hold: there, this
model's cache is moved before anybody could tell.
"""

from __future__ import annotations

from cli.machine import on_host
from cli.settings import BUNDLED_MODEL, Flags
from contracts.kv import DTYPE_BYTES
from runtime.config import GIB, Config, changed, says
from runtime.model_config import load_config
from runtime.model_directory import weight_bytes

#: Tokens whose KV fits into a node's HBM, about, and into its DRAM: one long conversation, and not another one beside it.
KV_TOKENS = 10_240
#: Tokens of a chunk: of a conversation's unfinished last one little is computed again.
CHUNK_TOKENS = 32
#: What `upbeat up` says of it, in MiB.
SMALL = (
    "the bundled model gets {:.0f} MiB of HBM and {:.0f} MiB of DRAM a node, so that conversations push each other out; "
    "more: --hbm-gib 1 --dram-gib 2"
)


def with_demo_memory(config: Config, flags: Flags) -> Config:
    """`config` with little HBM and DRAM, and small chunks, where it serves the bundled model on the CPU and neither flags, file nor
    environment say a size; else `config` itself. Raises ConfigError."""
    said = flags.hbm_gib or flags.dram_gib or any(says(flags.config, "kv", key) for key in ("hbm_gib", "dram_gib", "chunk_tokens"))
    if said or len(config.models) > 1 or config.model.resolve() != BUNDLED_MODEL.resolve() or not on_host(config):
        return config
    model = load_config(config.model)
    # What `worker.dtype: auto` makes of so small a model on the CPU; another type makes the same memory hold more.
    wide = DTYPE_BYTES["float32"]
    kv_bytes = KV_TOKENS * model.layers * 2 * model.kv_heads * model.head_dim * wide
    weights_bytes = weight_bytes(config.model) * wide // DTYPE_BYTES[model.dtype or "float32"]
    # A layer's weights fill whole granules, the last of them by half on average.
    held_bytes = weights_bytes + model.layers * config.worker.granule_bytes // 2
    kv = {"hbm_gib": (kv_bytes + held_bytes) / GIB, "dram_gib": kv_bytes / GIB, "chunk_tokens": CHUNK_TOKENS}
    return changed(config, {"kv": kv})


def with_demo_chunks(config: Config, flags: Flags) -> Config:
    """`config` with the chunks of `with_demo_memory` and memory of its own: what is measured for a stack holds for its chunks only."""
    return changed(config, {"kv": {"chunk_tokens": with_demo_memory(config, flags).kv.chunk_tokens}})
