"""The default memory of the bundled model on a CPU: small, so that conversations evict each other and hints matter.

With the general defaults, everything a newcomer says would stay in HBM. On a GPU the general defaults apply:
moving this model's cache takes no noticeable time there.
"""

from __future__ import annotations

from cli.adapters import adapters_bytes
from cli.machine import on_host
from cli.settings import BUNDLED_MODEL, Flags
from contracts.kv import DTYPE_BYTES
from runtime.config import Config
from runtime.config_file import changed, says
from runtime.model_config import load_config
from runtime.model_directory import weight_bytes
from runtime.sections import GIB

#: About how many tokens' KV fit into a node's HBM, and into its DRAM: one long conversation, but not two.
KV_TOKENS = 10_240
#: Small, as the unfinished last chunk of a conversation is computed again.
CHUNK_TOKENS = 32
#: What `upbeat up` prints; sizes in MiB.
SMALL = (
    "the bundled model gets {:.0f} MiB of HBM and {:.0f} MiB of DRAM a node, so that conversations push each other "
    "out; more: --hbm-gib 1 --dram-gib 2"
)


def with_demo_memory(config: Config, flags: Flags) -> Config:
    """`config` with small HBM, DRAM and chunks if it serves only the bundled model on a CPU and no flag, file or
    environment variable sets one of these; else `config` itself. Raises ConfigError."""
    is_set = (
        flags.hbm_gib
        or flags.dram_gib
        or any(says(flags.config, "kv", key) for key in ("hbm_gib", "dram_gib", "chunk_tokens"))
    )
    if is_set or len(config.models) > 1 or config.model.resolve() != BUNDLED_MODEL.resolve() or not on_host(config):
        return config
    model = load_config(config.model)
    # `worker.dtype: auto` gives float32 for so small a model on the CPU.
    value_bytes = DTYPE_BYTES["float32"]
    kv_bytes = KV_TOKENS * model.layers * 2 * model.kv_heads * model.head_dim * value_bytes
    weights_bytes = weight_bytes(config.model) * value_bytes // DTYPE_BYTES[model.dtype or "float32"]
    weights_bytes += adapters_bytes(config, config.served_model, config.model)
    # Each layer's weights take whole granules; on average the last one is half full.
    held_bytes = weights_bytes + model.layers * config.worker.granule_bytes // 2
    kv = {"hbm_gib": (kv_bytes + held_bytes) / GIB, "dram_gib": kv_bytes / GIB, "chunk_tokens": CHUNK_TOKENS}
    return changed(config, {"kv": kv})


def with_demo_chunks(config: Config, flags: Flags) -> Config:
    """`config` with the chunk size of `with_demo_memory` only: a profile holds for one chunk size."""
    return changed(config, {"kv": {"chunk_tokens": with_demo_memory(config, flags).kv.chunk_tokens}})
