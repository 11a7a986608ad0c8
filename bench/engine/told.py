"""The result of README.md, from result*.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from telling import quoted, read, stretch, table

HERE = Path(__file__).parent
#: A column's head, and the key of its figure in a cell.
OURS, VLLM, PACE = (
    ("ours, tokens/s", "ours_tokens_per_s"),
    ("vLLM", "vllm_tokens_per_s"),
    ("of the memory's pace", "share_of_memory_roofline"),
)
BEFORE, RATIO = ("before", "before_tokens_per_s"), ("ours / vLLM", "ratio")


def lowest(found: Any) -> Any:
    """The smallest ratio of its cells."""
    return min(cell["ratio"] for cell in found["cells"].values())


def ratio(cell: Any) -> str:
    """`0.98 (0.96 to 1.06)`: the median of the pairs, the smallest and the largest of them where they are known."""
    return f"{cell['ratio']:.2f}" + (f" ({stretch(cell['ratios'], '.2f')})" if "ratios" in cell else "")


def shown(cell: Any, key: str) -> str:
    if key == "ratio":
        return ratio(cell)
    if key not in cell:
        return ""
    return f"{100 * cell[key]:.0f} %" if key == PACE[1] else f"{cell[key]:.0f}"


def cells(found: Any, title: str, *columns: tuple[str, str]) -> str:
    """A row for each cell."""
    rows = [[quoted(name), *(shown(cell, key) for _, key in columns)] for name, cell in found["cells"].items()]
    return table((f"cell, {title}", *(head for head, _ in columns)), rows)


def result() -> str:
    two, one, avx2, tiles, again = (read(HERE / f"result{name}.json") for name in ("", "-one-thread", "-avx2", "-amx", "-avx512-before-after"))
    unsettled, cell = min(again["cells"].items(), key=lambda named: named[1]["ratio"])
    pairs = [value for of in again["cells"].values() for value in of["ratios"]]
    return f"""
**With bfloat16 instructions** (AVX-512 BF16, two cores of an AMD EPYC of the fourth generation, {quoted(two["date"][:10])}, nothing else running):
**{two["geometric_mean"]:.2f} x vLLM by geometric mean with two threads, no cell under {lowest(two):.2f} x; {one["geometric_mean"]:.2f} x with one thread, no cell under
{lowest(one):.2f} x.**

`bench/engine/run --pairs {two["settings"]["pairs"]:.0f}` (`result.json`):

{cells(two, "two threads", OURS, VLLM, RATIO, PACE)}

`bench/engine/run --pairs {one["settings"]["pairs"]:.0f} --threads 1 --prefills 512 2048 --batches 1 8 32 --contexts 128 1000 --out bench/engine/result-one-thread.json`, as every
instance of `bench/peers` has one core:

{cells(one, "one thread", OURS, VLLM, RATIO)}

### Quick looks

Few cells and short measurements: they say roughly where the engine stands on other processors, and are no results.

AVX2 only, two cores of an Intel Xeon that was held to AVX2 on both sides (`--avx2`: ours compiled with `-mno-avx512f -mno-amx-tile`; vLLM with its
AVX2 library, float32 weights, and oneDNN, MKL and torch told the same by their variables), {quoted(avx2["date"][:10])}, two threads,
`bench/engine/run --quick --avx2 --pairs {avx2["settings"]["pairs"]:.0f} --out bench/engine/result-avx2.json`: {avx2["geometric_mean"]:.2f} x vLLM by geometric mean, no cell under {lowest(avx2):.2f} x.
Products compute at the pace of oneDNN's or above (`docs/design/0007-cpu-kernels.md`); decoding reads half of vLLM's bytes.

{cells(avx2, "two threads, AVX2", OURS, ("vLLM in float32", VLLM[1]), RATIO, PACE)}

With tiles (AMX), two cores of the same Xeon, {quoted(tiles["date"][:10])}, `bench/engine/run --quick --pairs {tiles["settings"]["pairs"]:.0f} --out bench/engine/result-amx.json`:
{tiles["geometric_mean"]:.2f} x by geometric mean, {lowest(tiles):.2f} x in the lowest cell, the prompt: oneDNN's products with tiles are faster than ours. What was tried
stands in `docs/design/0007-cpu-kernels.md`.

{cells(tiles, "two threads, AMX", OURS, VLLM, RATIO, PACE)}

Before and after, AVX-512 BF16, two cores of an AMD EPYC of the fifth generation, {quoted(again["date"][:10])}: the engine beside itself before its blocks were made
for each register file, in turns, the cells of `--quick`, {again["settings"]["pairs"]:.0f} pairs (`result-avx512-before-after.json`, by
`bench/engine/run --quick --before {again["settings"]["before"][:7]}`). {again["geometric_mean"]:.2f} x by geometric mean. Single pairs reach from
{stretch(pairs, ".2f")} x, so this shows no difference and cannot show one of a few percent. The lowest cell ({quoted(unsettled)})
has {cell["ratio"]:.2f} x, and pairs of {stretch(cell["ratios"], ".2f")} x.

{cells(again, "two threads", OURS, BEFORE, ("ours / before", RATIO[1]))}
"""
