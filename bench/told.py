"""The table "Measured" of README.md, from the benches' JSON."""

from __future__ import annotations

import sys
from typing import Any

from telling import ROOT, quoted, read, stretch, table

BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH / "peers"))

from claims import E2E, OURS, curve  # noqa: E402


def engine() -> list[str]:
    two, one, avx2, tiles = (read(BENCH / "engine" / f"result{name}.json") for name in ("", "-one-thread", "-avx2", "-amx"))

    def ratios(of: Any) -> str:
        lowest = min(cell["ratio"] for cell in of["cells"].values())
        return f"{of['geometric_mean']:.2f} x (lowest cell {lowest:.2f} x)"

    answer = (
        f"with AVX-512 BF16, geometric means of the cells: {ratios(two)} with two threads, {ratios(one)} with one. Quick looks at fewer cells: "
        f"{ratios(avx2)} on AVX2 only, vLLM in float32; {ratios(tiles)} with AMX"
    )
    return ["tokens/s of the engine beside vLLM's CPU build, same model, weights and threads", answer, "`bench/engine/run`"]


def returning_session() -> list[str]:
    of = {name: found["ttft_median_s"] for name, found in read(BENCH / "returning_session" / "result.json")["conditions"].items()}
    answer = (
        f"{of['hbm']:.2f} s from device memory, {of['advised']:.2f} s from the other node's SSD with a hint two seconds ahead, "
        f"{of['unadvised']:.2f} s without, {of['recompute']:.1f} s recomputed"
    )
    return ["a returning 4,000-token session, 131 M parameters: first token", answer, "`bench/returning_session/run`"]


def kvstore() -> list[str]:
    figures = [of for part in read(BENCH / "kvstore" / "result.json")["parts"].values() for of in part["figures"]]

    again = [ratio for ratios in read(BENCH / "kvstore" / "result-again.json")["peer"].values() for ratio in ratios]

    def ratios(begins: str, against: str, more: list[Any]) -> str:
        found = [of["ratio"] for of in figures if of["question"].startswith(begins) and against in of["question"]]
        return stretch([*found, *more], ".2f")

    disk, peer = ratios("SSD to arena", "with O_DIRECT", []), ratios("peer's DRAM to arena", "a bare NIXL UCX READ", again)
    return ["SSD to arena and peer's DRAM to arena, every piece verified, beside bare NIXL", f"{disk} and {peer}", "`bench/kvstore/run`"]


def scaled(length: Any, times: Any) -> str:
    return f"a production trace (lengths × {length}, times × {times}, conversations of three turns and more)"


def peers() -> list[str]:
    found = read(BENCH / "peers" / "result.json")
    users = [int(point["users"]) for point in found["points"]]
    curves = {name: curve(found, name, E2E) for name in found["targets"]}
    best = [min(of[n] for name, of in curves.items() if name not in OURS and n in of) for n in users]
    p99 = {
        name: stretch([run["ttft_s"]["p99"] for run in found["targets"][name]["points"][f"{users[-1]} users"]["runs"]], ".0f")
        for name in ("upbeat", "vllm-sticky")
    }
    behind = {
        of["commit"]: of["targets"]["upbeat"]["64"]["end_to_end_mean_s"] / of["targets"]["vllm-sticky"]["64"]["end_to_end_mean_s"] - 1
        for of in read(BENCH / "peers" / "stretches.json")["stretches"]
        if "64" in of["targets"]["upbeat"] and "64" in of["targets"].get("vllm-sticky", {})
    }

    def told(seconds: list[Any]) -> str:
        return ", ".join(f"{value:.1f}" for value in seconds) + " s"

    answer = (
        f"{told([curves['upbeat'][n] for n in users])}; the best of vLLM and vLLM over LMCache (picture below) {told(best)}; our engine with "
        f"nothing kept {told([curves['recompute'][n] for n in users])}. What the mean costs: the slowest hundredth of first tokens at 64 takes "
        f"{p99['upbeat']} s, vLLM's {p99['vllm-sticky']}. In another stretch vLLM was {100 * max(behind.values()):.0f} % ahead at 64: all are in its README"
    )
    scale = scaled(found["workload"]["found"]["length_scale"], found["workload"]["time_scales"][0])
    question = f"people with {scale} on two nodes, 131 M parameters: mean end to end with 8, 16, 32 and 64 of them"
    return [question, answer, "`bench/peers/run --trace FILE`"]


def scheduler() -> list[str]:
    found = read(BENCH / "scheduler" / "result.json")
    fleet = found["fleets"][-1]
    p99 = {int(of["offered_per_s"]): of["p99_ms"] for of in fleet["at_rate"]}
    question = (
        f"turns that one scheduler places a second, on one core: {fleet['nodes']:,.0f} nodes, {found['settings']['sessions']:,.0f} sessions"
    )
    return [
        question,
        f"{fleet['most_per_s']:,.0f}; p99 {p99[1000]:.1f} ms at 1,000 a second, {p99[2000]:.0f} ms at 2,000",
        "`bench/scheduler/run`",
    ]


def policies() -> list[str]:
    found = read(BENCH / "policies" / "result.json")
    of = {name: figures["ttft_returning_turns_s"]["mean"] for name, figures in found["policies"].items()}
    load = found["settings"]
    question = f"{load['requests']:.0f} requests of {scaled(load['length_scale'], load['time_scale'])}, returning turns: mean first token"
    answer = f"{of['balanced']:.3f} s with hints and balancing, {of['sticky']:.3f} s sticky, {of['recompute']:.3f} s recomputed"
    return [question, answer, "`bench/policies/run --trace FILE`"]


def demo() -> list[str]:
    found = read(ROOT / "models" / "demo" / "result.json")
    by_length = {lengths: of for lengths, of in found.items() if isinstance(of, dict)}

    def shares(name: str) -> str:
        return ", ".join(f"{100 * of[name]:.1f} % at {quoted(lengths)}" for lengths, of in by_length.items())

    question = "the demo model's answers about held-out words in held-out phrasings: the wanted value and no other, letter by letter"
    answer = f"{shares('right_answers')}; the wanted sentence to the last character: {shares('exact_answers')}"
    return [question, answer, "`.venv/bin/python models/demo/evaluate.py --answers 400`"]


def result() -> str:
    rows = [part() for part in (returning_session, engine, kvstore, peers, scheduler, policies, demo)]
    return table(("question", "answer", "command"), rows)
