"""The figures at the top of README.md, from the benches' JSON: a headline, what each mechanism brings, and then
comparisons with others; a sentence or two each, with the day of the measurement.

`write_figures.py` writes list items without wrapping them, so lines are broken here, at 120 columns or less.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from write_figures import ROOT, Figure, quoted, read, stretch

BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH / "peers"))

from claim import END, RETURNING  # noqa: E402
from claimed import claims  # noqa: E402
from claims import E2E, OURS, curve  # noqa: E402
from evidence import figure  # noqa: E402
from intervals import LEAST  # noqa: E402
from measured import measurement  # noqa: E402


def headline() -> str:
    """Time to the first token of a returning session: with a hint, without one, and recomputed."""
    conditions = read(BENCH / "returning_session" / "result.json")["conditions"]
    ttft_s = {name: found["ttft_median_s"] for name, found in conditions.items()}

    def of(name: str) -> str:
        each = conditions[name]["ttft_s"]
        return f"{stretch(each, '.2f')} s in {Figure(len(each)):.0f}"

    return (
        f"**First token of a returning 4,000-token session: {ttft_s['recompute']:.1f} s recomputed, "
        f"{ttft_s['advised']:.2f} s after a hint.**\n\n"
        f"- Without a hint, from the other node's SSD: {ttft_s['unadvised']:.2f} s. With everything already in HBM: "
        f"{ttft_s['hbm']:.2f} s.\n"
        f"  Medians; ranges: recomputed {of('recompute')} sessions, hinted {of('advised')}, in HBM {of('hbm')}\n"
        "  (131 M parameters, two CPU cores, hint two seconds ahead; `bench/returning_session/run`,\n"
        f"  {day('returning_session/result.json')})."
    )


def mechanisms() -> str:
    """What hints, moves and cooperation bring alone under pressure, simulated, and both together for real."""
    found = {claim.says.split(":")[0]: figure(claim)[0] for claim in claims() if claim.result.startswith("pressure/")}
    real = read(BENCH / "pressure" / "result-real.json")
    switched = read(BENCH / "pressure" / "result-switches.json")["cells"]

    def both(what: str, at: str) -> str:
        ratios = [
            run[what][at] / other[what][at]
            for cell in real["cells"].values()
            for run in cell["balanced"]
            for other in cell["sticky"]
            if other["seed"] == run["seed"]
        ]
        return f"{stretch(sorted(ratios), '.2f')}"

    def without_cooperation(cell: Any) -> Any:
        means = [Figure(fmean(run[RETURNING]["mean"] for run in cell[arm])) for arm in ("no-cooperative", "balanced")]
        return means[0] / means[1]

    cooperation = ", ".join(
        f"{without_cooperation(cell):.1f} times with HBM for {quoted(name.split('memory ')[1].split(',')[0])}"
        for name, cell in switched.items()
    )

    draws = min(len(cell["balanced"]) for cell in switched.values())
    moves = [found[name] for name in ("Moves alone", "Moves, where hints are given")]
    undecided = ": no effect shown" if all(of.low < 1 < of.high for of in moves) else ""

    def times(name: str) -> str:
        of = found[name]
        return f"{Figure(of.value):.2f} ({Figure(of.low):.2f} to {Figure(of.high):.2f})"

    return (
        "- **What each mechanism brings**, simulated with little memory and much load, time to the first token of\n"
        f"  a returning turn ({'intervals' if moves[0].decides else 'ranges of the draws'}): hints {times('Hints alone')} of the time without them;\n"
        f"  moves {times('Moves alone')} without hints, {times('Moves, where hints are given')} with them{undecided};\n"
        f"  without cooperative HBM management {cooperation}\n"
        f"  of the live conversations' KV (`bench/pressure/run`, {day('pressure/result.json')}, four simulated A100s, "
        f"{Figure(draws):.0f} draws{'' if draws >= LEAST else ': too few to decide'}).\n"
        f"  On real stacks (two nodes, two CPU cores, {day('pressure/result-real.json')}), hints and moves together: "
        f"{both(RETURNING, 'mean')} of the time,\n  but {both(END, 'p95')} of p95 end to end, in "
        f"{Figure(len(next(iter(real['cells'].values()))['balanced'])):.0f} draws: not decided."
    )


def policies() -> str:
    """Time to the first token of returning turns: hints and balancing, sticky sessions, recomputing."""
    found = read(BENCH / "policies" / "result.json")
    mean_s = {name: figures["ttft_returning_turns_s"]["mean"] for name, figures in found["policies"].items()}
    load = found["settings"]
    return (
        f"- **Hints and balancing:** in {load['requests']:.0f} requests of\n"
        f"  {_scaled(load['length_scale'], load['time_scale'])},\n"
        f"  returning turns get their first token after {mean_s['balanced']:.3f} s in the mean; with sticky sessions "
        f"after {mean_s['sticky']:.3f} s,\n  recomputed after {mean_s['recompute']:.3f} s; one run of each "
        f"(`bench/policies/run --trace FILE`, {day('policies/result.json')})."
    )


def peers() -> str:
    """End-to-end latency at rising numbers of users beside vLLM and LMCache, and where ours is worse."""
    found = read(BENCH / "peers" / "result.json")
    users = [int(point["users"]) for point in found["points"]]
    curves = {name: curve(found, name, E2E) for name in found["targets"]}
    best_peer = [min(of[n] for name, of in curves.items() if name not in OURS and n in of) for n in users]
    p99_s = {
        name: stretch(
            [run["ttft_s"]["p99"] for run in found["targets"][name]["points"][f"{users[-1]} users"]["runs"]], ".0f"
        )
        for name in ("upbeat", "vllm-sticky")
    }
    behind = max(
        of["targets"]["upbeat"]["64"]["end_to_end_mean_s"] / of["targets"]["vllm-sticky"]["64"]["end_to_end_mean_s"] - 1
        for of in read(BENCH / "peers" / "stretches.json")["stretches"]
        if "64" in of["targets"]["upbeat"] and "64" in of["targets"].get("vllm-sticky", {})
    )
    return (
        "- **Our engine beside vLLM and LMCache**, whose settings no search chose (vLLM's default step), so not at\n"
        "  their best. Load: 8, 16, 32 and 64 users of\n"
        f"  {_scaled(found['workload']['found']['length_scale'], found['workload']['time_scales'][0])}, on two nodes.\n"
        f"  A turn takes {_seconds([curves['upbeat'][n] for n in users])} end to end in the mean; with vLLM or "
        f"vLLM over LMCache,\n  whichever is best, {_seconds(best_peer)}.\n"
        f"  But at 64 users our p99 time to first token is {p99_s['upbeat']} s, vLLM's {p99_s['vllm-sticky']} s, and "
        f"in one earlier run our mean\n  time end to end was {100 * behind:.0f} % above vLLM's "
        f"(`bench/peers/run --trace FILE`, {day('peers/result.json')})."
    )


def vllm() -> str:
    """What hints and stores give to unmodified vLLM servers, beside vLLM alone and with LMCache."""
    arms = read(BENCH / "vllm" / "result-returning.json")["arms"]
    ms = {name: of["ttft_median_ms"] for name, of in arms.items()}
    hinted_ms = ms["Upbeat, the other node's SSD, hinted"]
    loads = [read(BENCH / "vllm" / f"result-trace{name}.json") for name in ("", "-overload")]
    mean_s = {
        name: _seconds(
            [of["targets"][name]["points"][of["points"][0]["label"]]["summary"]["TTFT, mean"]["median"] for of in loads]
        )
        for name in ("upbeat", "lmcache-sticky", "vllm-sticky")
    }
    return (
        "- **Over unmodified vLLM servers:** first token of a returning session, hinted, from another node's\n"
        f"  SSD: {hinted_ms:.0f} ms; vLLM's own cache "
        f"{ms['vLLM, its own cache']:.0f}, LMCache's memory {ms['LMCache, memory']:.0f}, recomputed "
        f"{ms['vLLM, recomputed']:,.0f}. Under a trace,\n  two nodes with three times as much live KV as memory, "
        f"nearly full and overloaded: {mean_s['upbeat']} in the mean;\n  LMCache {mean_s['lmcache-sticky']}, "
        f"vLLM (its own cache only) {mean_s['vllm-sticky']}; {stretch(sorted(of['repeats'] for of in loads), '.0f')} repeats,\n  "
        f"not decided (`bench/vllm/run`, {day('vllm/result-trace.json')})."
    )


def engine() -> str:
    """Tokens per second of the CPU engine over those of vLLM's CPU build."""
    found = read(BENCH / "engine" / "result.json")
    return (
        f"- **CPU engine:** its tokens/s are {_ratio(found)} those of vLLM's CPU build with two\n"
        "  threads and AVX-512 BF16, a geometric mean over cells: prompt lengths, or batch sizes and contexts\n"
        f"  (`bench/engine/run`, {day('engine/result.json')}; on other processors there were only quick looks)."
    )


def evidence() -> str:
    """Where a reader finds intervals, commits and verdicts."""
    sources = {path: measurement(path) for path in (f"bench/{claim.result}" for claim in claims())}
    old = sum(not source.current for source in sources.values())
    return (
        f"- **{Figure(len(claims())):.0f} claims**, with interval, commit, machine and what would refute them: "
        "[docs/evidence.md](docs/evidence.md).\n"
        f"  Of their {Figure(len(sources)):.0f} results, {Figure(old):.0f} were measured on older code than this."
    )


def result() -> str:
    return "\n".join((headline(), mechanisms(), policies(), vllm(), peers(), engine(), evidence()))


def day(result: str) -> str:
    """When a result under bench/ was measured."""
    return quoted(measurement(f"bench/{result}").date)


def _scaled(length_scale: Any, time_scale: Any) -> str:
    return f"a production trace (lengths × {length_scale}, times × {time_scale}, conversations of three turns and more)"


def _seconds(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:.1f}" for value in values) + " s"


def _ratio(found: Any) -> str:
    lowest = min(cell["ratio"] for cell in found["cells"].values())
    return f"{found['geometric_mean']:.2f} x (lowest cell {lowest:.2f} x)"
