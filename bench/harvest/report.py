"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from write_figures import quoted, read, table


def result() -> str:
    path = Path(__file__).with_name("result.json")
    if not path.exists():
        return "Not measured yet."
    found = read(path)
    settings, machine = found["settings"], found["machine"]
    parts = [profile(found["profile"])]
    parts += [trace(found["trace"], settings)] if "trace" in found else []
    parts += [batches(found["batches"])] if "batches" in found else []
    if (path := path.with_name("result-busy.json")).exists():
        parts += [busy(read(path))]
    of = f"arrivals and lengths of {quoted(settings['trace'])}" if settings["trace"] else "drawn arrivals and lengths"
    return f"""
`bench/harvest/run`, {quoted(str(found["date"])[:10])}, {machine["cores"]:.0f} cores of {quoted(machine["cpu"])}, commit
{quoted(found["commit"])}: {quoted(settings["shape"])}, {settings["weight_bytes"] / 2**20:.0f} MiB of weights; {of} times
{settings["scale"]:.3f}, {settings["per_s"]:.2f} requests/s, stretches of {settings["seconds"]:.0f} s, {settings["repeats"]:.0f}
repeats; target {1e3 * settings["target_s"]:.0f} ms a token. {quoted(found["note"])}

{(chr(10) * 2).join(parts)}
"""


def busy(found: Any) -> str:
    settings, machine = found["settings"], found["machine"]
    return (
        f"A busier load, {settings['per_s']:.2f} requests/s, and a target of {1e3 * settings['target_s']:.0f} ms "
        f"({quoted(str(found['date'])[:10])}, {machine['cores']:.0f} cores of {quoted(machine['cpu'])}, commit "
        f"{quoted(found['commit'])}, {settings['repeats']:.0f} repeats). " + trace(found["trace"], settings)
    )


def profile(found: Any) -> str:
    steps = found["steps"]
    sizes, splits = (
        list(dict.fromkeys(s["batch"] for s in steps)),
        list(dict.fromkeys((s["infer"], s["training"]) for s in steps)),
    )
    rows = []
    for infer, training in splits:
        mine = {s["batch"]: s for s in steps if (s["infer"], s["training"]) == (infer, training)}
        rate = mine[sizes[0]]["trained_tokens_s"]
        rows.append((
            f"{infer:.0f} + {training:.0f}",
            *(f"{1e3 * mine[size]['step_s']:.1f} ms" for size in sizes),
            f"{mine[sizes[0]]['weights_bytes_s'] / 1e9:.1f} GB/s",
            f"{rate:.1f}" if rate else "-",
        ))  # fmt: skip
    heads = (
        "cores: serving + training",
        *(f"batch {size:.0f}" for size in sizes),
        "weights read, batch 1",
        "trained tokens/s",
    )
    errors = [
        f"{name}: mean {100 * each['mean']:.1f} %, worst {100 * each['worst']:.1f} %"
        for name, each in found["errors"].items()
        if each
    ]
    return (
        "A decode step (figures 3 to 5), 256 tokens of context a sequence, from the fit:\n\n"
        + table(heads, rows)
        + f"\n\nErrors on steps that nothing was fitted to (figure 12): {'; '.join(errors)}."
    )


def trace(rows: Any, settings: Any) -> str:
    shown = []
    for arm in dict.fromkeys(r["arm"] for r in rows):
        mine = [r for r in rows if r["arm"] == arm]

        def mid(of: Any, mine: Any = mine) -> Any:
            return median(of(r) for r in mine)

        rates = sorted(r["trained_tokens_s"] for r in mine)
        shown.append((
            arm,
            f"{mid(lambda r: r['ttft_s']['p99']):.2f} s",
            f"{1e3 * mid(lambda r: r['tpot_s']['p50']):.0f}, {1e3 * mid(lambda r: r['tpot_s']['p99']):.0f} ms",
            f"{1e3 * mid(lambda r: r['tbt_s']['p99']):.0f} ms",
            f"{100 * mid(lambda r: r['in_time']):.1f} %",
            f"{median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})" if rates[-1] else "-",
        ))  # fmt: skip
    heads = ("arm", "TTFT P99", "TPOT P50, P99", "TBT P99", "tokens in time", "trained tokens/s (least to most)")
    return "The trace (figures 11a, 11b), medians of the repeats:\n\n" + table(heads, shown)


def batches(rows: Any) -> str:
    shown = [
        (
            f"{r['batch']:.0f}",
            f"{1e3 * r['tbt_s']['p50']:.0f}, {1e3 * r['tbt_s']['p99']:.0f} ms",
            f"{r['trained_tokens_s']:.1f}",
            f"{min(s['window'] for s in r['seen']):.0f} to {max(s['window'] for s in r['seen']):.0f}",
            f"{sum(s['split'] for s in r['seen']) / len(r['seen']):.2f}",
        )
        for r in rows
    ]
    heads = (
        "answers at a time",
        "TBT P50, P99",
        "trained tokens/s",
        "frozen layers in memory",
        "cores for training, mean",
    )
    return "So many answers at a time, one phase after the other (figures 13, 14):\n\n" + table(heads, shown)
