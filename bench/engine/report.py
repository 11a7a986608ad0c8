"""The result in README.md, from result*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from write_figures import quoted, read, stretch, table

HERE = Path(__file__).parent
#: (column head, key of its figure in a cell).
OURS, VLLM, PACE = (
    ("ours, tokens/s", "ours_tokens_per_s"),
    ("vLLM", "vllm_tokens_per_s"),
    ("of the memory's pace", "share_of_memory_roofline"),
)
BEFORE, RATIO = ("before", "before_tokens_per_s"), ("ours / vLLM", "ratio")


def lowest(found: Any) -> Any:
    """The lowest ratio of the result's cells."""
    return min(cell["ratio"] for cell in found["cells"].values())


def ratio(cell: Any) -> str:
    """The pairs' median and, if known, their range: `0.98 (0.96 to 1.06)`."""
    return f"{cell['ratio']:.2f}" + (f" ({stretch(cell['ratios'], '.2f')})" if "ratios" in cell else "")


def shown(cell: Any, key: str) -> str:
    """One figure of a cell, formatted; empty if it has none."""
    if key == "ratio":
        return ratio(cell)
    if key not in cell:
        return ""
    return f"{100 * cell[key]:.0f} %" if key == PACE[1] else f"{cell[key]:.0f}"


def cells(found: Any, title: str, *columns: tuple[str, str]) -> str:
    """A table with a row per cell."""
    rows = [[quoted(name), *(shown(cell, key) for _, key in columns)] for name, cell in found["cells"].items()]
    return table((f"cell, {title}", *(head for head, _ in columns)), rows)


def result() -> str:
    two, one, avx2, tiles, again = (
        read(HERE / f"result{name}.json") for name in ("", "-one-thread", "-avx2", "-amx", "-avx512-before-after")
    )
    pairs = [value for of in again["cells"].values() for value in of["ratios"]]
    return f"""
**With bfloat16 instructions** (AVX-512 BF16, two cores of an AMD EPYC, {quoted(two["date"][:10])}):
**{two["geometric_mean"]:.2f} x vLLM by geometric mean with two threads, no cell under {lowest(two):.2f} x; {one["geometric_mean"]:.2f} x with one thread, no cell under
{lowest(one):.2f} x.**

`bench/engine/run --pairs {two["settings"]["pairs"]:.0f}` (`result.json`):

{cells(two, "two threads", OURS, VLLM, RATIO, PACE)}

`bench/engine/run --pairs {one["settings"]["pairs"]:.0f} --threads 1 --prefills 512 2048 --batches 1 8 32 --contexts 128 1000 --out bench/engine/result-one-thread.json`:

{cells(one, "one thread", OURS, VLLM, RATIO)}

### Quick looks

Few cells and short measurements.

AVX2 only (`--avx2`; vLLM with float32 weights), two cores of an Intel Xeon, {quoted(avx2["date"][:10])}, two threads, `bench/engine/run --quick --avx2 --pairs {avx2["settings"]["pairs"]:.0f} --out bench/engine/result-avx2.json`: {avx2["geometric_mean"]:.2f} x vLLM by geometric mean, no cell under {lowest(avx2):.2f} x.
Decoding reads half of vLLM's bytes.

{cells(avx2, "two threads, AVX2", OURS, ("vLLM in float32", VLLM[1]), RATIO, PACE)}

AMX, two cores of the same Xeon, {quoted(tiles["date"][:10])}, `bench/engine/run --quick --pairs {tiles["settings"]["pairs"]:.0f} --out bench/engine/result-amx.json`:
{tiles["geometric_mean"]:.2f} x by geometric mean, {lowest(tiles):.2f} x in the lowest cell, prefill: oneDNN's AMX products are faster than ours
(`docs/design/0007-cpu-kernels.md`).

{cells(tiles, "two threads, AMX", OURS, VLLM, RATIO, PACE)}

Before and after sizing kernel blocks by register file: AVX-512 BF16, an AMD EPYC of the fifth generation, {quoted(again["date"][:10])},
`bench/engine/run --quick --before {again["settings"]["before"][:7]}`, {again["settings"]["pairs"]:.0f} pairs (`result-avx512-before-after.json`). No difference shows, and one of a few percent could not:
{again["geometric_mean"]:.2f} x by geometric mean, single pairs from {stretch(pairs, ".2f")} x.

{cells(again, "two threads", OURS, BEFORE, ("ours / before", RATIO[1]))}
"""
