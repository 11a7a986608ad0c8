"""The result in README.md, from result.json and returning.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import Figure, quoted, read, stretch, table

HERE = Path(__file__).parent
#: Of the 8B shape.
LAYERS, CHUNK_TOKENS = 32, 64
CACHES = {
    "recompute": "nowhere: recomputed",
    "unadvised": "on the other node's SSD, no hint",
    "advised": "on the other node's SSD, a hint four seconds ahead",
    "hbm": "in this node's HBM",
}


def result() -> str:
    found = read(HERE / "result.json")["figures"]
    conditions = read(HERE / "returning.json")["conditions"]
    loads, granules, weights = found["loads"], found["granules"], found["activation"]
    token_s = loads["piece_bytes"] * LAYERS / CHUNK_TOKENS / loads["load_gb_s"] / 1e9
    return f"""
2026-11-26, one NVIDIA H100 80GB, 16 cores, torch 2.11 (CUDA 13), driver 580 (`result.json`). Ceilings:
{found["ceilings"]["copy_gb_s"]:.0f} GB/s within the device, {found["ceilings"]["matrix_tflop_s"]:.0f} TFLOP/s.

{table(("decode: batch", "context", "tokens/s", "ms a step", "share of the copy's rate"), ((f"{d['batch']:.0f}", f"{d['context']:,.0f}", f"{d['tokens_s']:.0f}", f"{d['step_s'] * 1e3:.1f}", f"{d['share'] * 100:.0f} %") for d in found["decode"]))}

{table(("prefill: tokens", "tokens/s", "share of the product's rate"), ((f"{p['tokens']:,.0f}", f"{p['tokens_s']:,.0f}", f"{p['share'] * 100:.0f} %") for p in found["prefill"]))}

Loads of {loads["piece_bytes"] / 1024:.0f} KiB pieces from page-locked DRAM: {loads["load_gb_s"]:.1f} GB/s,
{loads["share"] * 100:.0f} % of one copy; saves {loads["save_gb_s"]:.1f} GB/s.

{table(("ms to the first token: context", "cache in HBM", "in DRAM", "loaded first, then computed", "recomputed"), ((f"{t['context']:,.0f}", f"{t['hbm_s'] * 1e3:.0f}", f"{t['dram_s'] * 1e3:.0f}", f"{(t['hbm_s'] + t['context'] * token_s) * 1e3:.0f}", f"{t['recompute_s'] * 1e3:.0f}") for t in found["first_token"]))}

In DRAM, layers are computed while later ones are loaded. "Loaded first" is what the same parts would take one after the
other.

{table(("a granule of 2 MiB", "microseconds"), (("mapped with new memory", f"{granules['map_new_us']:.0f}"), ("mapped with memory of another owner", f"{granules['map_again_us']:.0f}"), ("of that: access rights", f"{granules['allow_us']:.0f}"), ("unmapped", f"{granules['unmap_us']:.0f}")))}

{table((f"activation from an image ({weights['gb']:.1f} GB)", "new memory", "warm memory"), (("all weights are there", f"{weights['weights_new_s']:.2f} s", f"{weights['weights_warm_s']:.2f} s"), ("first token of a 512-token prompt", f"{weights['first_token_new_s']:.2f} s", f"{weights['first_token_warm_s']:.2f} s"), ("weights have gone", f"{weights['gone_new_s']:.2f} s", f"{weights['gone_warm_s']:.2f} s")))}

When the model is active that first token takes {weights["active_s"] * 1e3:.0f} ms. Prism reports 0.7 s for an 8B model.
Meanwhile another model's matrix product takes {weights["product_meanwhile_p50_s"] * 1e6:.0f} instead of
{weights["product_alone_p50_s"] * 1e6:.0f} microseconds (p99 {weights["product_meanwhile_p99_s"] * 1e6:.0f} instead of
{weights["product_alone_p99_s"] * 1e6:.0f}).

{lent(found["circulation"])}

The whole stack, two nodes on that one device, KV moved without NIXL: `bench/returning_session/run --shape 8b --sessions
2 --tokens 12000 --lead-s 4 …` (`returning.json`), two sessions a condition:

{table(("the cache is", "median TTFT", "range"), ((CACHES[name], f"{conditions[name]['ttft_median_s']:.2f} s", stretch(conditions[name]["ttft_s"], ".2f")) for name in CACHES))}

Without a hint the turn is slower than recomputed: it begins to load, and the SSD is slower than was expected of it. One
of the two hinted turns came before its last pages.
"""


def lent(found: Any) -> str:
    """What layers that take turns cost."""
    cells = {(name, row["lent"], row["slots"]): row["step_s"] for name, rows in found["steps"].items() for row in rows}
    lents = sorted({row["lent"] for rows in found["steps"].values() for row in rows})
    rows = []
    for name in found["steps"]:
        if name == "prefill of 8192":
            continue  # several steps
        alone = cells[name, 0, 0]
        layer_s = alone / found["layers"]
        best = [min(cells[name, lent, slots] for slots in (1, 2)) / alone for lent in lents if lent]
        border = max((lent for lent in range(int(found["layers"]) - 2) if allowed(lent, found, layer_s)), default=0)
        rows.append((quoted(name), f"{alone * 1e3:.1f} ms", *(f"{x:.2f} x" for x in best), f"{Figure(border):.0f}"))
    heads = ("a step", "all layers here", *(f"{lent:.0f} lent" for lent in lents if lent), "allowed")
    return f"""Layers that lend their memory (`worker.remap`): a copy of a layer takes {found["copy_s"] * 1e3:.1f} ms. A step takes so many
times as long as with all layers here, with the better number of slots; `allowed` is what the controller's equations allow:

{table(heads, rows)}

So at this link's speed a layer may lend its memory only in large steps, and the controller refuses the others."""


def allowed(lent: int, found: Any, layer_s: float) -> bool:
    """Equations 4 and 5."""
    copy_s, layers = found["copy_s"], found["layers"]
    return copy_s * (lent + 1) <= layer_s * (layers - lent - 1) or copy_s * (lent + 2) <= layer_s * layers
