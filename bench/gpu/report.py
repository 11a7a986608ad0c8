"""The result in README.md, from result.json and returning.json."""

from __future__ import annotations

from pathlib import Path

from write_figures import read, stretch, table

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

The whole stack, two nodes on that one device, KV moved without NIXL: `bench/returning_session/run --shape 8b --sessions
2 --tokens 12000 --lead-s 4 …` (`returning.json`), two sessions a condition:

{table(("the cache is", "median TTFT", "range"), ((CACHES[name], f"{conditions[name]['ttft_median_s']:.2f} s", stretch(conditions[name]["ttft_s"], ".2f")) for name in CACHES))}

Without a hint the turn is slower than recomputed: it begins to load, and the SSD is slower than was expected of it. One
of the two hinted turns came before its last pages.
"""
