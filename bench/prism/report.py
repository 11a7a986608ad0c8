"""The results in README.md, from results/figure-*.json: the paper's statement, then ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from write_figures import Figure, quoted, read, table

HERE = Path(__file__).parent
#: Systems of the paper, and the product's policies that stand for them.
NAMES = {
    "static": "S-Partition (`static`)",
    "elastic": "MuxServe++ (`elastic`)",
    "swap": "QLM (`swap`)",
    "serverless": "ServerlessLLM (`serverless`)",
    "prism": "`prism`",
    "prism-placed": "`prism`, each model on one device",
}
TTFT_SCALE, TPOT_SCALE = "5", "3"


def figure(name: str) -> Any:
    """A figure's results; None: not run yet."""
    path = HERE / "results" / f"figure-{name}.json"
    return read(path) if path.exists() else None


def _share(row: Any, of: str, scale: str) -> str:
    return f"{100 * row['attainment'][of][scale]:.0f} %" if row is not None and row["held"] else "-"


def _find(rows: Sequence[Any], **want: Any) -> Any:
    return next((row for row in rows if all(row[name] == value for name, value in want.items())), None)


def _values(rows: Sequence[Any], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def five() -> str:
    found = figure("5")
    rows, parts = found["rows"], []
    for load in _values(rows, "load"):
        own = [row for row in rows if row["load"] == load]
        rates = _values(own, "rate")
        lines = [
            [f"{title}, {NAMES[arm]}", *(_share(_find(own, arm=arm, rate=rate), of, scale) for rate in rates)]
            for title, of, scale in (("TTFT", "ttft", TTFT_SCALE), ("TPOT", "tpot", TPOT_SCALE))
            for arm in _values(own, "arm")
        ]
        parts.append(f"`{load}`:\n\n" + table(("requests kept to", *(f"{r:.0f} requests/s" for r in rates)), lines))
    return f"""
## Figure 5, row 1: 8 models on 2 devices, against the request rate

Paper: Prism has 99 % TTFT at up to 3.5 times the load of the others, then MuxServe++, S-Partition and QLM in this order (section 7.2). Here, TTFT
within {TTFT_SCALE} times and TPOT within {TPOT_SCALE} times P95 alone:

{parts[0]}

{parts[1] if len(parts) > 1 else ""}

{_targets(found)}
"""


def _targets(found: Any) -> str:
    each = [target for of_load in found["targets"].values() for target in of_load.values()]
    ttft, tpot = ([target[name] for target in each] for name in ("ttft_s", "tpot_s"))
    stats, rows = found["traces"]["chat"], found["rows"]
    rate = _values([row for row in rows if row["load"] == "chat"], "rate")[-1]
    moved = _find(rows, load="chat", rate=rate, arm="prism")
    return (
        f"In {found['seconds']:.0f} s at {rate:.0f} requests/s `prism` activates {moved['activations']:.0f} models and preempts "
        f"{moved['preemptions']:.0f} requests (paper: 2 activations and 3 migrations in 10 minutes). `elastic` has each model on the device that "
        "its mean demand in the whole trace gives; `prism` knows only what has come. With `chat` it moves and exchanges models until they are "
        "as well placed; its late requests wait for weights, or for memory before that. With `api` memory is short on both devices. There it "
        "stays behind: models take turns, and one that has moved keeps its old weights until its last request there has ended. These loads "
        "hardly need idle models' memory.\n\n"
        f"Targets: P95 alone is {min(ttft):.2f} to {max(ttft):.2f} s and {1000 * min(tpot):.1f} to {1000 * max(tpot):.1f} ms a token (paper: 0.04 to "
        f"0.13 s, 5.2 to 50.9 ms). Trace `chat`: {100 * stats['active_share_10_s']:.0f} % of the models active, {stats['idle_intervals_an_hour']:.0f} "
        f"idle intervals above 10 s an hour and model. Weights take {100 * found['weights_share_of_one_device'] / 2:.0f} % of the two devices."
    )


def five_scales() -> str:
    rows, parts = figure("5")["rows"], []
    for load in _values(rows, "load"):
        own = [row for row in rows if row["load"] == load]
        rate = _values(own, "rate")[-1]
        for title, of in (("TTFT", "ttft"), ("TPOT", "tpot")):
            scales = list(own[0]["attainment"][of])
            lines = [
                [NAMES[arm], *(_share(_find(own, arm=arm, rate=rate), of, scale) for scale in scales)]
                for arm in _values(own, "arm")
            ]
            head = (f"{title}, `{load}`, {rate:.0f} requests/s", *(quoted(f"x {scale}") for scale in scales))
            parts.append(table(head, lines))
    return f"""
## Figure 5, row 2: the same, against the scale of targets

Paper: at the largest scale MuxServe++ has 84.79 % and 67.22 % TTFT, the best of the others; Prism soon has 99 %. Here, the highest rate:

{chr(10).join(part + chr(10) for part in parts)}
"""


def devices(name: str, title: str, paper: str) -> str:
    found = figure(name)
    if found is None:
        return ""
    rows, parts = found["rows"], []
    for load in _values(rows, "load"):
        own = [row for row in rows if row["load"] == load]
        counts = _values(own, "devices")
        rate = found["traces"][load]["requests_per_s"]
        lines = [
            [f"{what}, {NAMES[arm]}", *(_share(_find(own, arm=arm, devices=count), of, scale) for count in counts)]
            for what, of, scale in (("TTFT", "ttft", TTFT_SCALE), ("TPOT", "tpot", TPOT_SCALE))
            for arm in _values(own, "arm")
        ]
        head = (f"`{load}`, {rate:.0f} requests/s", *(f"{count:.0f} devices" for count in counts))
        parts.append(table(head, lines))
    return f"\n## {title}\n\n{paper}\n\n" + "\n\n".join(parts) + "\n"


def ten() -> str:
    paper = {
        "Llama-3.2-1B": "0.7",
        "Llama-3.2-3B": "0.7",
        "Qwen2.5-7B": "0.7",
        "Llama-3.1-8B": "0.7",
        "Qwen2.5-14B": "1.3",
    }
    lines = [
        [
            quoted(row["model"].split("#")[0]),
            f"{row['weight_bytes'] / 1e9:.1f} GB",
            f"{paper[name]} s" if (name := row["model"].split("#")[0]) in paper else "-",
            f"{row['weights_s']:.2f} s",
            f"{row['first_token_cold_s']:.2f} s",
            f"{row['first_token_active_s']:.3f} s",
        ]
        for row in figure("10")["rows"]
    ]
    head = ("model", "weights", "paper, at most", "here", "first token, cold", "first token, active")
    return f"""
## Figure 10: activation by size

Paper: from pageable memory. Here: from page-locked memory, with copies and mapping as measured on an H100 (bench/gpu), and the first token of
512 tokens. Models above 70B (paper: 1.5 s) need several devices: not in the product.

{table(head, lines)}
"""


def fourteen() -> str:
    rows = figure("14")["rows"]
    paper = {28.0: "+ 3.5 %, + 7 %", 32.0: "+ 4 %, + 13 %"}

    def more(rate: Figure, name: str) -> str:
        static, elastic = (_find(rows, rate=rate, arm=arm)[name] for arm in ("static", "elastic"))
        return f"{1000 * static:.1f} to {1000 * elastic:.1f} ms ({100 * (elastic / static - 1):+.2f} %)"

    lines = [
        [f"{rate:.0f} requests/s", paper[float(rate)], more(rate, "ttft_mean_s"), more(rate, "tpot_mean_s")]
        for rate in _values(rows, "rate")
    ]
    return f"""
## Figure 14: the worst case

Two Llama-3.2-3B at constant load on an A100-40G, `static` to `elastic`. Paper, TTFT and TPOT of Prism over static partitioning; here:

{table(("", "paper", "TTFT", "TPOT"), lines)}

The simulator counts maps and unmaps on the device's thread, and nothing else that ballooning costs; `bench/balloon` measures that.
"""


def result() -> str:
    parts = [
        five() if figure("5") is not None else "",
        five_scales() if figure("5") is not None else "",
        devices(
            "5-devices",
            "Figure 5, row 3: 18 models of 1 to 8B, against the number of devices",
            "Paper: Prism has 99 % with 4 and 5 devices; no other has 99 % TTFT with 8. Here (-: the weights do not fit):",
        ),
        devices(
            "9",
            "Figure 9: 54 of the 58 models, against the number of devices",
            "Paper: 58 models, 99 % TTFT with 16 devices (Prism) and 32 (MuxServe++). Here without the four models that need several devices (-: the weights do not fit):",
        ),
        ten() if figure("10") is not None else "",
        fourteen() if figure("14") is not None else "",
    ]
    return "\n".join(part.strip() + "\n" for part in parts if part)
