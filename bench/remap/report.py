"""The result in README.md, from result.json."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from write_figures import Figure, quoted, read, table

_PARTS = {"loads": "One model", "turns": "Two models in turn", "both": "Two models at once"}


def result() -> str:
    path = Path(__file__).with_name("result.json")
    if not path.exists():
        return "Not measured yet."
    found = read(path)
    settings, machine = found["settings"], found["machine"]
    parts = [steps(each) for each in found.get("steps", [])]
    parts += [compared(title, found[part]) for part, title in _PARTS.items() if part in found]
    parts += [ended(found)]
    if (later := path.with_name("result-wake.json")).exists():
        of = read(later)
        parts += [
            f"`bench/remap/run --parts back,wake`, {quoted(str(of['date'])[:10])}, {of['machine']['cores']:.0f} cores of "
            f"{quoted(of['machine']['cpu'])}, commit {quoted(of['commit'])}. {quoted(of['note'])}".rstrip(),
            ended(of),
        ]
    return f"""
`bench/remap/run`, {quoted(str(found["date"])[:10])}, {machine["cores"]:.0f} cores of {quoted(machine["cpu"])}, commit
{quoted(found["commit"])}: {settings["weight_bytes"] / 2**20:.0f} MiB of weights a model and {settings["kv_bytes"] / 2**20:.0f}
MiB for KV ({settings["kv_bytes"] / settings["token_bytes"]:.0f} tokens), lengths {quoted(settings["mix"])}, stretches of
{settings["seconds"]:.0f} s, {settings["repeats"]:.0f} repeats. {quoted(found["note"])}

{(chr(10) * 2).join(filter(None, parts))}
"""


def ended(found: Any) -> str:
    """What became of layers that were lent."""
    parts = [back(found["back"])] if "back" in found else []
    parts += [wake(found["wake"])] if "wake" in found else []
    return (chr(10) * 2).join(parts)


def steps(found: Any) -> str:
    rows = [
        (
            f"{row['batch']:.0f}",
            f"{found['copy_s'] / row['alone_s'] * 24:.2f}",
            f"{row['lent']:.0f}",
            f"{1e3 * row['alone_s']:.1f} ms",
            f"{row['one_slot_s'] / row['alone_s']:.2f} x",
            f"{row['two_slots_s'] / row['alone_s']:.2f} x",
            "refuses" if row["slots_by_rule"] is None else f"{row['slots_by_rule']:.0f}",
        )
        for row in found["rows"]
    ]
    heads = ("batch", "r", "layers lent", "a step, all layers here", "one slot", "two slots", "slots by the rule")
    return (
        f"Threads that compute: {found['threads']:.0f}; a copy of a layer takes {1e3 * found['copy_s']:.2f} ms.\n\n"
        + table(heads, rows)
    )


def compared(title: str, rows: list[Any]) -> str:
    arms, loads = list(dict.fromkeys(r["arm"] for r in rows)), list(dict.fromkeys(r["per_s"] for r in rows))

    def cell(load: Any, arm: str) -> list[str]:
        mine = [r for r in rows if (r["arm"], r["per_s"]) == (arm, load)]

        def mid(of: Any) -> Any:
            return Figure(median(map(of, mine)))

        return [
            f"{load:g}",
            f"`{arm}`",
            f"{mid(lambda r: r['ttft_s']['p99']):.2f} s",
            f"{1e3 * mid(lambda r: r['tbt_s']['p50']):.0f} ms",
            f"{1e3 * mid(lambda r: r['tbt_s']['p99']):.0f} ms",
            f"{mid(lambda r: r['tokens_s']):.1f}",
            f"{mid(lambda r: r['counters']['preemptions']):.0f}",
            f"{mid(lambda r: r['counters']['lent'] + r['counters']['lent_too']):.0f}",
        ]

    heads = ("requests/s", "arm", "TTFT P99", "TBT P50", "TBT P99", "tokens/s", "preempted", "layers lent")
    return f"{title}, medians of the repeats:\n\n" + table(heads, [cell(load, arm) for load in loads for arm in arms])


def back(found: Any) -> str:
    of = ", ".join(
        f"{peak['seconds']:.1f} s ({peak['lent']:.0f} layers; requests ran for {peak['ran_s']:.0f} s more)"
        for peak in found["peaks"]
    )
    return f"From when all KV fits without lent memory until all layers are back: {of}."


def wake(rows: list[Any]) -> str:
    by = {arm: sorted(row["ttft_s"] for row in rows if row["arm"] == arm) for arm in ("preempt", "remap")}
    lent = sorted({row["lent"] for row in rows if row["arm"] == "remap"})
    layers = " to ".join(f"{count:.0f}" for count in dict.fromkeys((lent[0], lent[-1])))
    middle = {arm: Figure(median(of)) for arm, of in by.items()}
    return (
        f"A model that lent {layers} layers while idle answers its next prompt after "
        f"{middle['remap']:.2f} s ({by['remap'][0]:.2f} to {by['remap'][-1]:.2f}); with remapping off after "
        f"{middle['preempt']:.2f} s ({by['preempt'][0]:.2f} to {by['preempt'][-1]:.2f}): "
        f"{middle['remap'] / middle['preempt']:.2f} times."
    )
