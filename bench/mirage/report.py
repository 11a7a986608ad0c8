"""The results in README.md, from results/figure-*.json: the paper's statement, then ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from write_figures import Figure, quoted, read, table

HERE = Path(__file__).parent
#: What a row of the headline figures says of an arm.
_HEAD = ("P99 TBT", "P99 TTFT", "tokens/s", "preemptions", "layers lent")


def figure(name: str) -> Any:
    """A figure's results; None: not run yet."""
    path = HERE / "results" / f"figure-{name}.json"
    return read(path) if path.exists() else None


def _ms(row: Any, name: str = "tbt_p99_ms") -> str:
    return f"{row[name]:.1f} ms"


def _s(row: Any, name: str = "ttft_p99_s") -> str:
    return f"{row[name]:.2f} s"


def _line(label: Sequence[str], row: Any) -> list[str]:
    what = [_ms(row), _s(row), f"{row['tokens_per_s']:.0f}", f"{row['preemptions']:.0f}", f"{row['lendings']:.0f}"]
    return [*label, f"`{row['arm']}`", *(what if row["held"] else ["-"] * len(what))]


def _change(rows: Sequence[Any], arm: str, name: str, against: str = "recompute") -> Figure:
    """Mean over loads of the change against another arm, in percent."""
    pairs = zip(
        [row[name] for row in rows if row["arm"] == arm],
        [row[name] for row in rows if row["arm"] == against],
        strict=True,
    )
    each = [100 * (ours / theirs - 1) for ours, theirs in pairs]
    return Figure(sum(each) / len(each))


def _means(rows: Sequence[Any], arms: Sequence[str] = ("remap", "even"), against: str = "recompute") -> str:
    said = []
    for arm in arms:
        tbt, ttft, rate = (_change(rows, arm, name, against) for name in ("tbt_p99_ms", "ttft_p99_s", "tokens_per_s"))
        said.append(f"`{arm}` P99 TBT {tbt:+.0f} %, P99 TTFT {ttft:+.1f} %, tokens/s {rate:+.0f} %")
    return f"Here, mean over these loads, against `{against}`: {'; '.join(said)}."


def _compared(
    name: str, title: str, paper: str, head: Sequence[str], label: Callable[[Any], Sequence[str]], **means: Any
) -> str:
    rows = figure(name)["rows"]
    lines = [_line(label(row), row) for row in rows]
    return f"## {title}\n\n{paper}\n\n{_means(rows, **means)}\n\n{table((*head, 'arm', *_HEAD), lines)}"


def _rate(row: Any) -> str:
    return f"{row['rate']:g}"


def four() -> str:
    found = figure("4")
    return (
        "## Figure 4: the example\n\nPaper: 52 GB of weights on an 80 GB H100; with a third of them remapped a batch is "
        f"1.75 times as large. Here {found['weights_gb']:.1f} GB of weights leave {found['kv_gb']:.1f} GB for KV: "
        f"{found['batch_times']:.2f} times."
    )


def five() -> str:
    rows = figure("5")["rows"]
    lines = [
        [
            quoted(row["device"]),
            f"{row['batch']:.0f}",
            f"{row['step_ms']:.1f} ms",
            f"{row['copies_ms']:.0f} ms",
            f"{row['layers']:.0f}",
        ]
        for row in rows
    ]
    head = ("device", "batch", "step", "copies of all layers", "layers that may be lent")
    return (
        "## Figure 5b: computing against copying\n\nPaper: the larger the batch, the more layers copies can bring during "
        "a step, so their number must follow the load. Here, OPT-13b with 256 tokens a sequence, without a cap:\n\n"
        + table(head, lines)
    )


def eight() -> str:
    return _compared(
        "8",
        "Figure 8: models in turn, C1 and C2",
        "Paper, against vLLM: C1 P99 TBT - 54.4 %, P99 TTFT - 96.7 %, tokens/s + 39.9 %; C2 - 44.8 %, - 74.8 %, + 45.3 %.",
        ("models", "lengths", "requests/s"),
        lambda row: (quoted(row["models"]), row["lengths"], _rate(row)),
    )


def nine() -> str:
    return _compared(
        "9",
        "Figure 9: C2 in turn, different rates",
        "Paper: P99 TBT - 82.5 %, P99 TTFT - 99.3 %, tokens/s + 86.7 %.",
        ("requests/s of A, B",),
        lambda row: (", ".join(f"{each:g}" for each in row["rates"]),),
    )


def ten() -> str:
    return _compared(
        "10",
        "Figure 10: C2 in turn, long and short requests",
        "Paper: P99 TBT - 57.1 %, P99 TTFT - 98.1 %, tokens/s + 65.6 %.",
        ("lengths of A, B",),
        lambda row: (", ".join(row["lengths"]),),
    )


def eleven() -> str:
    return _compared(
        "11",
        "Figure 11: which idle model lends first, C1 round robin, brief answers",
        "Paper: MRU has up to 22 % less tail latency than LRU. `remap` is MRU.",
        ("requests/s",),
        lambda row: (_rate(row),),
        arms=("remap",),
        against="LRU",
    )


def twelve() -> str:
    return _compared(
        "12",
        "Figure 12: C1, all models busy on one device",
        "Paper (MPS): P99 TBT - 65.5 %, P99 TTFT - 20.7 %, tokens/s + 6.6 %. Here models compute in turns, a step each.",
        ("lengths", "requests/s of each"),
        lambda row: (row["lengths"], _rate(row)),
    )


def thirteen() -> str:
    return _compared(
        "13",
        "Figure 13: C1 on strictly divided instances",
        "Paper (MIG): P99 TBT - 57.4 %, P99 TTFT - 34.8 %, tokens/s + 7.9 %. Here each model has an instance with its part "
        "of memory, compute, bandwidth and link.",
        ("model", "requests/s"),
        lambda row: (quoted(row["model"]), _rate(row)),
    )


def fourteen() -> str:
    return _compared(
        "14",
        "Figure 14: against KV that is swapped, OPT-13b, Alpaca",
        "Paper, MIRAGE against Pie: P99 TBT equal, P99 TTFT - 93.6 %, tokens/s + 47.1 %. Our `pie` swaps as much as one "
        "step of a single sequence hides.",
        ("requests/s",),
        lambda row: (_rate(row),),
        against="pie",
    )


def fifteen() -> str:
    return _compared(
        "15",
        "Figure 15: slots, OPT-13b, Alpaca",
        "Paper: one slot always (alpha+1) has up to 12.7 % fewer tokens/s. Arms lend as many layers as `remap` may.",
        ("requests/s",),
        lambda row: (_rate(row),),
        arms=("remap", "alpha+1", "even"),
        against="alpha+2",
    )


def sixteen() -> str:
    rows = figure("16")["rows"]
    lines = [
        [_rate(row), f"`{row['arm']}`", *(_ms(row, f"tbt_p{p}_ms") for p in (50, 90, 99))]
        for row in rows
        if row["arm"] != "reversion"
    ]
    (back,) = (row for row in rows if row["arm"] == "reversion")
    return (
        "## Figure 16: layers that come back, OPT-13b, Alpaca\n\nPaper: reversion lowers P50 TBT by 49 % at 1 request/s, "
        "little at 10. Here after a peak; `kept` takes nothing back. Where the controller lends no more than copies hide, "
        f"what stays lent costs little. After a burst that lent {back['layers']:.0f} layers the last one was back "
        f"{abs(back['back_s']):.1f} s {'after' if back['back_s'] > 0 else 'before'} the burst's last answer.\n\n"
        + table(("requests/s", "arm", "P50 TBT", "P90", "P99"), lines)
    )


def seventeen() -> str:
    rows = figure("17")["rows"]
    lines = [
        [
            _rate(row),
            f"`{row['arm']}`",
            _s(row, "latency_p50_s"),
            _s(row, "latency_p99_s"),
            _ms(row, "tbt_p50_ms"),
            _ms(row),
            f"{row['tokens_per_s']:.0f}",
        ]
        for row in rows
    ]
    head = ("requests/s", "arm", "P50 latency", "P99 latency", "P50 TBT", "P99 TBT", "tokens/s")
    return (
        "## Figure 17: a cap, OPT-13b, Alpaca\n\nPaper: with a cap P99 - 58 % and P50 - 44 % at 10 requests/s. `uncapped` "
        "lends without regard to copies.\n\n" + table(head, lines)
    )


def ratio() -> str:
    found = figure("ratio")
    borders = [
        [
            f"{row['ratio']:g}",
            f"{row['one_slot_most']:.0f}",
            f"{row['two_slots_most']:.0f}",
            f"{row['controller_most']:.0f}",
            f"{row['step']:.2f}",
            f"{row['step_beyond']:.2f}",
        ]
        for row in found["borders"]
    ]
    head = ("r", "equation (4)", "equation (5)", "the controller, without its cap", "a step there", "one layer beyond")
    lines = [_line([f"{row['ratio']:g}"], row) for row in found["rows"]]
    return (
        "## Where it pays: r = T_T / T_c\n\nMost layers of OPT-13b that may be lent, and steps as multiples of one without "
        "waits:\n\n"
        + table(head, borders)
        + "\n\nOPT-13b alone, ShareGPT, 4 requests/s:\n\n"
        + table(("r", "arm", *_HEAD), lines)
    )


def result() -> str:
    made = {
        "8": eight,
        "9": nine,
        "10": ten,
        "11": eleven,
        "12": twelve,
        "13": thirteen,
        "14": fourteen,
        "15": fifteen,
        "16": sixteen,
        "17": seventeen,
        "ratio": ratio,
        "4": four,
        "5": five,
    }
    return "\n\n".join(make().strip() for name, make in made.items() if figure(name) is not None)
