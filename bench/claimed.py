"""The claims of this project that a result decides: what is claimed, the figure, the bound that would refute it, the
command that measures it again. `docs/evidence.md` is written from this list; `bench/rerun.py` measures it again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from claim import END, Claim, Document, arms, cells, codec, ladder, lent, repeats, sessions, vllm_arms
from intervals import LEAST, Estimate, of_ratios

HERE = Path(__file__).parent
_TRACE = "--trace mooncake_conversation.jsonl"
_PEERS = "--targets upbeat,lmcache-sticky,vllm-sticky --repeats 5"
_FULL = (
    f"bench/vllm/run trace {_TRACE} --users 160 --time-scale 6 --seconds 190 --begin-within 80 --warm-up 90 {_PEERS}"
)
_OVERLOADED = f"bench/vllm/run trace {_TRACE} --users 64 {_PEERS}"
_H100 = "bench/returning_session/run --shape 8b --tokens 12000 --lead-s 4 --hbm-gib 34 --dram-gib 8"
_PRESSURE = f"bench/pressure/run {_TRACE}"
_MOONCAKE = "the trace mooncake_conversation.jsonl (kvcache-ai/Mooncake)"
_VLLM = "vLLM's environment (`make vllm`)"
_RETURNING = "bench/returning_session/run"
_SIMULATED = (
    "Simulated: virtual time, the production cores, costs of an A100 with Llama 3.1 8B. `sticky` has the default "
    "`kv.layer_priority: false`; on is its better setting, for which there is no result yet (docs/design/0036)"
)
_HINTED = "Upbeat, the other node's SSD, hinted"
_WITHOUT = f"{_PRESSURE} --switches"
_SEARCHED = (
    "Of vLLM only two step sizes were tried, of LMCache nothing; vLLM alone has no memory but its own cache "
    "(bench/vllm). `bench/matched` will search more; it has no result yet"
)

#: First what each mechanism brings alone, then what all bring, then beside others, then that nothing breaks.
GROUPS: dict[str, tuple[Claim, ...]] = {
    "Each mechanism alone": (
        Claim(
            "Hints alone: with sticky sessions, the first token of a returning turn comes sooner with hints.",
            "pressure/result.json",
            arms("sticky-hints", "sticky"),
            1.0,
            _PRESSURE,
            50,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Moves alone: without hints, it comes sooner with balanced placement than with sticky sessions.",
            "pressure/result.json",
            arms("balanced-no-hints", "sticky"),
            1.0,
            _PRESSURE,
            50,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Moves, where hints are given: it comes sooner with balanced placement than with sticky sessions.",
            "pressure/result.json",
            arms("balanced", "sticky-hints"),
            1.0,
            _PRESSURE,
            50,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Cooperative HBM management: without it, the first token of a returning turn comes later.",
            "pressure/result-switches.json",
            arms("no-cooperative", "balanced"),
            1.0,
            _WITHOUT,
            20,
            below=False,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Layer-wise loading: without it, it comes later.",
            "pressure/result-switches.json",
            arms("no-layerwise", "balanced"),
            1.0,
            _WITHOUT,
            20,
            below=False,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Layer priority, which is off by default: with it, it comes sooner.",
            "pressure/result-switches.json",
            arms("layer-priority", "balanced"),
            1.0,
            _WITHOUT,
            20,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "Weights that lend memory: where requests wait for KV memory, the first token comes sooner than "
            "with recomputing.",
            "remap/result.json",
            lent("ttft_s", "mean"),
            1.0,
            "bench/remap/run --parts loads --loads 0.5,1.5,2.0 --seconds 15 --repeats 5",
            40,
        ),
        Claim(
            "The same: the 99th percentile of the time between tokens is shorter.",
            "remap/result.json",
            lent("tbt_s", "p99"),
            1.0,
            "bench/remap/run --parts loads --loads 0.5,1.5,2.0 --seconds 15 --repeats 5",
            40,
        ),
    ),
    "Hints and moves together": (
        Claim(
            "With a hint, a session whose cache is on another node's SSD gets its first token at most 1.5 times "
            "as late as one in HBM.",
            "returning_session/result.json",
            sessions("advised", "hbm"),
            1.5,
            _RETURNING,
            8,
        ),
        Claim(
            "With a hint it takes at most an eighth of recomputing.",
            "returning_session/result.json",
            sessions("advised", "recompute"),
            1 / 8,
            _RETURNING,
            8,
        ),
        Claim(
            "Without a hint, loading takes at most a quarter of recomputing.",
            "returning_session/result.json",
            sessions("unadvised", "recompute"),
            1 / 4,
            _RETURNING,
            8,
        ),
        Claim(
            "Under pressure, a returning turn gets its first token sooner than with sticky sessions.",
            "pressure/result.json",
            arms("balanced", "sticky"),
            1.0,
            _PRESSURE,
            50,
            needs=_MOONCAKE,
            note=_SIMULATED,
        ),
        Claim(
            "The same on real stacks with slowed disks.",
            "pressure/result-real.json",
            arms("balanced", "sticky"),
            1.0,
            f"{_PRESSURE} --real",
            100,
            needs=f"{_MOONCAKE}; root",
        ),
        Claim(
            "The same, end to end, 95th percentile.",
            "pressure/result-real.json",
            arms("balanced", "sticky", END, "p95"),
            1.0,
            f"{_PRESSURE} --real",
            100,
            needs=f"{_MOONCAKE}; root",
        ),
        Claim(
            "On an H100, with a hint, a session is at most 1.5 times as late as one in HBM.",
            "gpu/returning.json",
            sessions("advised", "hbm"),
            1.5,
            _H100,
            10,
            needs="an NVIDIA GPU",
        ),
    ),
    "Beside others": (
        Claim(
            "Over vLLM, a hinted session from another node's SSD gets its first token at most 1.25 times as late "
            "as from vLLM's own cache.",
            "vllm/result-returning.json",
            vllm_arms(_HINTED, "vLLM, its own cache"),
            1.25,
            "bench/vllm/run returning",
            15,
            needs=_VLLM,
        ),
        Claim(
            "Over vLLM, it is sooner than from LMCache's memory.",
            "vllm/result-returning.json",
            vllm_arms(_HINTED, "LMCache, memory"),
            1.0,
            "bench/vllm/run returning",
            15,
            needs=_VLLM,
        ),
        Claim(
            "Over vLLM under a trace, three times as much live KV as memory, nearly full: mean TTFT is below "
            "the best peer's.",
            "vllm/result-trace.json",
            repeats("upbeat", ("vllm-sticky", "lmcache-sticky"), "ttft_s"),
            1.0,
            _FULL,
            90,
            needs=f"{_VLLM}; {_MOONCAKE}",
            note=_SEARCHED,
        ),
        Claim(
            "The same, overloaded.",
            "vllm/result-trace-overload.json",
            repeats("upbeat", ("vllm-sticky", "lmcache-sticky"), "ttft_s"),
            1.0,
            _OVERLOADED,
            90,
            needs=f"{_VLLM}; {_MOONCAKE}",
            note=_SEARCHED,
        ),
        Claim(
            "Our own engine beside vLLM, 64 users: mean time end to end is below the best peer's.",
            "peers/result.json",
            repeats("upbeat", ("vllm-sticky", "lmcache-sticky"), END),
            1.0,
            f"bench/peers/run {_TRACE} --repeats 5",
            450,
            needs=f"{_VLLM}; {_MOONCAKE}",
            note="vLLM ran with its default step of 2,048 tokens, which no search chose, and within 60 s targets "
            "answered different requests. So this says nothing of vLLM at its best.",
        ),
        Claim(
            "Our CPU engine's tokens/s are above vLLM's, AVX-512 BF16, two threads.",
            "engine/result.json",
            cells,
            1.0,
            "bench/engine/run --pairs 3",
            40,
            below=False,
            needs=_VLLM,
        ),
        Claim(
            "The same with AMX.",
            "engine/result-amx.json",
            cells,
            1.0,
            "bench/engine/run --quick --pairs 5",
            15,
            below=False,
            needs=_VLLM,
            note="Few cells.",
        ),
    ),
    "Nothing breaks": (
        Claim(
            "Cached, loaded, evicted and restarted: greedy answers are those without a cache.",
            "needle_ladder/result.json",
            ladder,
            0.995,
            "bench/needle_ladder/run --sessions 800",
            40,
            below=False,
        ),
        Claim(
            "With the codec k16v8, greedy answers are those without a codec.",
            "codecs/result.json",
            codec("k16v8"),
            0.99,
            "bench/codecs/run --conversations 400",
            80,
            below=False,
        ),
        Claim(
            "With the codec fp8, greedy answers are those without a codec.",
            "codecs/result.json",
            codec("fp8"),
            0.99,
            "bench/codecs/run --conversations 400",
            80,
            below=False,
        ),
        Claim(
            "A flood of hints of one tenant costs others less than 10 % of their median time to the first token.",
            "hint_flood/result.json",
            lambda d: of_ratios(d["ttft_p50_ratio"]["each"], "pairs"),
            1.1,
            "bench/hint_flood/run",
            10,
        ),
    ),
}


def other_traces() -> tuple[Claim, ...]:
    """What hints bring under each other trace that bench/pressure has a result of."""
    made = []
    for path in sorted((HERE / "pressure").glob("result-trace-*.json")):
        name = path.stem.removeprefix("result-trace-")
        for says, ours in (("Hints alone", "sticky-hints"), ("Hints and moves", "balanced")):
            text = f"{says}, trace {name}: a returning turn's first token comes sooner than with sticky sessions."
            of, where = arms(ours, "sticky"), f"pressure/{path.name}"
            command = f"bench/pressure/run --trace {name}.jsonl"
            made.append(Claim(text, where, of, 1.0, command, 30, needs=f"the trace {name}.jsonl", note=_SIMULATED))
    return tuple(made)


def matched(metric: str, load: str, other: str | None = None) -> Callable[[Document], Estimate]:
    """Of bench/matched: ours over another target, or over the peer that is best in the figure, at a load."""

    def estimate(d: Document) -> Estimate:
        of = d["loads"][load]
        verdict = next(v for v in of["verdicts"] if v["metric"] == metric) if other is None else {"peer": other}
        against = of["targets"][verdict["peer"]]
        ratio, enough = against["ours_over_it"][metric], against["repeats"] >= LEAST
        samples = f"{against['requests']:.0f} requests, {against['repeats']:.0f} repeats"
        return Estimate(ratio["value"], *ratio["interval"], samples, decides=bool(enough))

    return estimate


def matched_requests() -> tuple[Claim, ...]:
    """Of each load of bench/matched: hints alone, and ours beside the best peer. None without a result."""
    path = HERE / "matched" / "result.json"
    if not path.exists():
        return ()
    made, unhinted, needs = [], "upbeat-vllm-unhinted", f"{_VLLM}; {_MOONCAKE}"

    def claim(says: str, of: Callable[[Document], Estimate]) -> Claim:
        return Claim(says, "matched/result.json", of, 1.0, f"bench/matched/run compare {_TRACE}", 300, needs=needs)

    for label, of in json.loads(path.read_text())["loads"].items():
        rate = f"{of['requests_per_s']:.2g} requests/s"
        returning = "TTFT of returning turns, mean"
        if "ours_over_it" in of["targets"].get(unhinted, {}):
            says = f"Over vLLM, hints alone shorten the mean TTFT of returning turns, {rate}."
            made.append(claim(says, matched(returning, label, unhinted)))
        for verdict in of["verdicts"]:
            if verdict["peer"] is not None:
                says = f"Over vLLM, {verdict['metric']} is below the best peer's at its best settings, {rate}."
                made.append(claim(says, matched(verdict["metric"], label)))
    return tuple(made)


GROUPS["Other traces"] = other_traces()
GROUPS["Matched requests, peers at their best"] = matched_requests()


def claims() -> list[Claim]:
    """All, in the order of the document."""
    return [claim for group in GROUPS.values() for claim in group]
