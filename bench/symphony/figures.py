"""Simulates SYMPHONY's figures at the paper's scale: eight A100s, Llama-3.1-8B and Llama-2-13B. Returns plain data."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.symphony import agents, loads
from bench.symphony.curves import at_equal, crossings
from contracts.ids import DEFAULT_TENANT
from loadtest.habits import Habits
from loadtest.simulate.cells import Cell, Cells
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.fleet import VARIANTS, Variant
from loadtest.simulate.mechanisms import BLOB, DRAM, HBM, Mechanisms
from loadtest.simulate.presets import A100, LLAMA_2_7B, PRESETS, a100
from loadtest.simulate.scenario import SAMPLE_EVERY_S, Run
from loadtest.simulate.users import Script

NODES = 8
KIND_8B, KIND_13B = PRESETS["a100-llama-3.1-8b"], PRESETS["a100-llama-2-13b"]
#: Longest conversations in tokens: the 8B model's context in the paper, and what fits a device beside others with 13B.
MOST_8B, MOST_13B = 100_000, 24_000
SYSTEMS = ("recompute", "infercept", "llumnix", "llumnix-infercept", "balanced")
ARMS = (
    "recompute", "prefix-caching", "infercept", "infercept-ssd", "lmcache-ssd",
    "sticky", "sticky-hints", "balanced-no-hints", "balanced",
)  # fmt: skip
#: Loads up to past saturation of eight devices. 13B has six times the KV per token and saturates sooner.
USERS_8B, USERS_13B = (64, 256, 512, 1024, 1536, 2048), (64, 128, 256, 384, 512, 640, 1024)
#: Users start within this share of the warm-up, so that the queue of their histories is empty before counting.
START_WITHIN = 0.6
Load = Callable[..., list[Script]]


@dataclass
class Bench:
    """Settings and runner of all simulations. say: called with a line after each run. load: the default load. cells:
    runs that were simulated before."""

    quick: bool
    seed: int
    say: Callable[[str], None]
    load: Load = loads.sharegpt_like
    cells: Cells = field(default_factory=lambda: Cells(None))

    @property
    def seconds(self) -> tuple[float, float]:
        """(virtual seconds of a run, those of them not counted)."""
        return (100.0, 50.0) if self.quick else (300.0, 160.0)

    @property
    def seeds(self) -> list[int]:
        """Seeds of figures whose differences are near chance."""
        return [self.seed] if self.quick or self.load is loads.busy else [self.seed, self.seed + 1, self.seed + 2]

    def mean_row(self, kind: NodeKind, users: int, variant: Variant, habits: Habits | None = None) -> dict[str, Any]:
        """A row with means over a run per seed."""
        more = {} if habits is None else {"habits": {DEFAULT_TENANT: habits}}
        rows = [row(users, variant, replace(self, seed=seed).run(kind, users, variant, **more)) for seed in self.seeds]
        named = [name for name in rows[0] if all(isinstance(r[name], float) for r in rows)]
        return rows[0] | {name: float(np.mean([r[name] for r in rows])) for name in named}

    def on_gpus(self, found: Cell, span_s: tuple[float, float] | None = None) -> npt.NDArray[np.float64]:
        """Requests on each GPU (columns) over a run's counted time (rows of `SAMPLE_EVERY_S`)."""
        seconds, warm_up_s = span_s or self.seconds
        return np.array(found.loads[1 : 1 + int((seconds - warm_up_s) / SAMPLE_EVERY_S)])

    def users(self, every: Sequence[int]) -> tuple[int, ...]:
        """The loads of a curve; two of them if quick."""
        return tuple(every[1:3]) if self.quick else tuple(every)

    def run(
        self,
        kind: NodeKind,
        users: int,
        variant: Variant,
        load: Load | None = None,
        *,
        urgent: float = 0.0,
        **more: Any,
    ) -> Cell:
        """Simulate one run, or find its cell."""
        seconds, warm_up_s = more.pop("span_s", self.seconds)
        most = MOST_13B if kind.model == KIND_13B.model else MOST_8B
        options = {"urgent": urgent} if urgent else {}
        said = (load or self.load)(users, seconds, most, self.seed, **options)
        nodes, spread_s = more.pop("nodes", NODES), START_WITHIN * warm_up_s
        found = self.cells.run(
            Run(kind, nodes, variant, users, seconds, self.seed, warm_up_s, spread_s=spread_s, **more), said
        )
        f = found.figures
        self.say(
            f"{kind.model}, {users} users, {variant.name}: {1000 * f['normalised_s']['mean']:.1f} ms a token, "
            f"{f['real_s']:.0f} s"
        )
        return found

    def curve(
        self, kind: NodeKind, variants: Sequence[Variant], users: Sequence[int], load: Load | None = None
    ) -> list[dict[str, Any]]:
        """A row per system and load."""
        return [row(n, v, self.run(kind, n, v, load)) for n in users for v in variants]

    def mean_curve(self, kind: NodeKind, variants: Sequence[Variant], users: Sequence[int]) -> list[dict[str, Any]]:
        """Like `curve`, with means over `seeds`."""
        return [self.mean_row(kind, n, v) for n in users for v in variants]


def row(users: int, variant: Variant, found: Cell) -> dict[str, Any]:
    """A run's figures."""
    f = found.figures
    return {
        "users": users,
        "system": variant.name,
        "tpot_s": f["tpot_s"].get("mean"),
        "ttft_s": f["ttft_s"].get("mean"),
        "ttft_p99_s": f["ttft_s"].get("p99"),
        "normalised_s": f["normalised_s"].get("mean"),
        "end_to_end_s": f["end_to_end_s"].get("mean"),
        "requests_per_s": f["requests_per_s"],
        "output_tokens_per_s": f["output_tokens_per_s"],
        "requests": f["requests"],
        "under_way": f["requests_per_s"] * f["end_to_end_s"].get("mean", 0.0) / users,  # by Little's law
        "unfinished": f["unfinished"],
        "cached_share_returning": f["cached_share_returning"],
        "peak_to_median": f["peak_to_median"].get("whole_run"),
        "migrated": f["migrated"],
        "hints": f["hints"]["sent"],
        "moved_bytes": f["moved_bytes"],
    }


# ---- the motivating figures ---------------------------------------------------------------------------------------
def figure_1(bench: Bench) -> dict[str, Any]:
    """Requests on the most and the least loaded GPU over time, for InferCept and ours."""
    users = 256 if bench.quick else 1024
    span_s = bench.seconds if bench.quick else (600.0, 160.0)
    found = {}
    for name in ("infercept", "balanced"):
        table = bench.on_gpus(bench.run(KIND_8B, users, VARIANTS[name], span_s=span_s), span_s)
        found[name] = {
            "most": table.max(axis=1).round(3).tolist(),
            "least": table.min(axis=1).round(3).tolist(),
            "mean": table.mean(axis=1).round(3).tolist(),
        }
    return {"users": users, "model": KIND_8B.model, "every_s": SAMPLE_EVERY_S, "systems": found}


def figure_2(bench: Bench) -> dict[str, Any]:
    """TPOT of one A100 by concurrent requests, without user pauses."""
    rows = []
    for together in (1, 2, 4, 8, 16, 32, 64):

        def at_once(users: int, seconds: float, most: int, seed: int) -> list[Script]:
            said = loads.sharegpt_like(users, seconds * 12, most, seed)
            return [
                replace(s, turns=tuple(replace(t, typing_s=0.001, reading_s=0.0) for t in s.turns))
                for s in said
                if s.turns[0].typing_s < 1e8
            ]

        found = bench.run(KIND_8B, together, VARIANTS["recompute"], at_once, nodes=1)
        step_s, _ = KIND_8B.costs.decode(together, together * 2200.0)
        rows.append(
            {"requests_at_a_time": together, "tpot_s": found.figures["tpot_s"]["mean"], "decode_step_s": step_s}
        )
    return {"model": KIND_8B.model, "context_tokens": 2200, "rows": rows}


def figure_4(bench: Bench) -> dict[str, Any]:
    """TTFT of a returning turn by the length of its history: recomputed, swapped in first, or loaded layer-wise."""
    kind, new = a100(LLAMA_2_7B, 32_768), 113
    rows = []
    for history in (512, 1024, 2048, 4096, 8192, 16_384):
        rest_s = kind.costs.prefill_s(new, history)
        load_s = history * kind.shape.token_bytes / kind.dram_bytes_per_s
        each_s = load_s / kind.shape.layers
        rows.append(
            {
                "history_tokens": history,
                "recompute_s": kind.costs.prefill_s(history + new, 0),
                "swap_s": load_s + rest_s,
                "layerwise_s": max(each_s + rest_s, load_s + rest_s / kind.shape.layers),
                "already_there_s": rest_s,
            }
        )
    return {"model": LLAMA_2_7B.name, "new_tokens": new, "device": A100.name, "rows": rows}


def figure_5(bench: Bench) -> dict[str, Any]:
    """The share of a prompt that earlier turns already computed, by turn."""
    sums: dict[int, list[float]] = {}
    turns = [0, 0]
    lengths = []
    for n in range(1000 if bench.quick else 20_000):
        rng = random.Random(f"{bench.seed} {n}")
        said = loads.conversation(rng, loads.chat_turn, MOST_8B, loads.turn_count(rng))
        turns[0] += len(said) > 1
        turns[1] += 1
        history = 0
        for number, turn in enumerate(said, 1):
            if number <= 20:
                both = sums.setdefault(number, [0.0, 0.0])
                both[0] += history
                both[1] += history + turn.new_tokens
            history += turn.new_tokens + turn.answer_tokens
        lengths.append((len(said), history))
    return {
        "conversations": turns[1],
        "multi_turn_share": turns[0] / turns[1],
        "mean_turns": float(np.mean([n for n, _ in lengths])),
        "mean_session_tokens": float(np.mean([t for _, t in lengths])),
        "longest_turns": max(n for n, _ in lengths),
        "share_of_recomputed_tokens_all": sum(a for a, _ in sums.values()) / sum(b for _, b in sums.values()),
        "rows": [{"turn": n, "wasted_share": a / b} for n, (a, b) in sorted(sums.items())],
    }


def figure_6(bench: Bench) -> dict[str, Any]:
    """Recompute, swap, and swap with migration when a request arrives, on eight GPUs."""
    variants = [VARIANTS[n] for n in ("recompute", "infercept", "infercept-migration")]
    found = {"8b": (KIND_8B, (256, 1024, 1536)), "13b": (KIND_13B, (128, 384, 512))}
    return {name: bench.curve(kind, variants, bench.users(users)) for name, (kind, users) in found.items()}


# ---- the evaluation -----------------------------------------------------------------------------------------------
def figure_11(bench: Bench) -> dict[str, Any]:
    """TPOT, TTFT and requests/s against users, Llama-3.1-8B."""
    return against_users(bench, KIND_8B, USERS_8B, bench.curve)


def figure_12(bench: Bench) -> dict[str, Any]:
    """Like figure 11, Llama-2-13B."""
    return against_users(bench, KIND_13B, USERS_13B, bench.mean_curve) | {"seeds": bench.seeds}


def against_users(
    bench: Bench, kind: NodeKind, users: Sequence[int], curve: Callable[..., list[dict[str, Any]]]
) -> dict[str, Any]:
    """All systems at rising load, and where their curves cross."""
    rows = curve(kind, [VARIANTS[n] for n in SYSTEMS], bench.users(users))
    return {"model": kind.model, "rows": rows, "crossings": crossings(rows), "users_at_equal_tpot": at_equal(rows)}


def figure_13(bench: Bench) -> dict[str, Any]:
    """The systems of figure 11 under bursts."""
    rows = bench.curve(
        KIND_8B, [VARIANTS[n] for n in SYSTEMS], bench.users((256, 512, 1024, 1536)), loads.burstgpt_like
    )
    return {"model": KIND_8B.model, "rows": rows, "crossings": crossings(rows)}


def figure_14(bench: Bench) -> dict[str, Any]:
    """KV in remote storage behind a slow link: LMCache, and ours with and without its codec."""
    codec = VARIANTS["lmcache"].has
    remote = frozenset((HBM, DRAM, BLOB))
    coded = Mechanisms(remote, codec=codec.codec, decode_bytes_per_s=codec.decode_bytes_per_s)
    variants = [
        VARIANTS["lmcache"],
        replace(VARIANTS["balanced"], name="balanced, remote tier", has=Mechanisms(remote)),
        replace(VARIANTS["balanced"], name="balanced, remote tier, codec", has=coded),
        replace(VARIANTS["balanced"], name="balanced, all tiers"),
    ]
    kind = replace(KIND_13B, blob_bytes_per_s=1.25e9)
    return {
        "model": kind.model,
        "remote_bytes_per_s": kind.blob_bytes_per_s,
        "codec": codec.codec,
        "rows": bench.curve(kind, variants, bench.users((128, 256, 384, 512))),
    }


def figure_15(bench: Bench) -> dict[str, Any]:
    """Requests on each GPU with 256 users."""
    found = {}
    for model, kind in (("8b", KIND_8B), ("13b", KIND_13B)):
        for name in ("recompute", "infercept", "llumnix-infercept", "balanced"):
            outcome = bench.run(kind, 256, VARIANTS[name])
            table = bench.on_gpus(outcome)
            found[f"{model} {name}"] = {
                "peak_to_median": outcome.figures["peak_to_median"],
                "each_gpu_mean": table.mean(axis=0).round(3).tolist(),
                "each_gpu_peak": table.max(axis=0).round(3).tolist(),
            }
    return {"users": 256, "systems": found}


def figure_16(bench: Bench) -> dict[str, Any]:
    """Few and many teams of agents that write 4, 8 and 12 files each."""
    rows = []
    for teams, files in [(4, 4)] if bench.quick else [(teams, files) for teams in (24, 96) for files in (4, 8, 12)]:
        for name in ("recompute", "parrot", "infercept", "balanced-no-hints", "balanced"):
            found = agents.serve(KIND_8B, NODES, VARIANTS[name], files, teams, projects=2, seed=bench.seed)
            bench.say(f"{teams} teams, {files} files, {name}: {found['project_mean_s']:.1f} s a project")
            rows.append({"files": files, "system": name} | found)
    return {"model": KIND_8B.model, "rows": rows}


def figure_17(bench: Bench) -> dict[str, Any]:
    """Each mechanism switched off."""
    variants = [
        VARIANTS[n] for n in ("balanced", "no-cooperative", "layer-priority", "no-layerwise", "balanced-no-hints")
    ]
    variants.append(replace(VARIANTS["sticky"], name="no balancing"))
    rows = bench.mean_curve(KIND_13B, variants, bench.users((128, 256, 384, 512)))
    return {"model": KIND_13B.model, "seeds": bench.seeds, "rows": rows}


def figure_18(bench: Bench) -> dict[str, Any]:
    """Prompts of 1,024 tokens, answers of one."""
    return {
        "model": KIND_8B.model,
        "rows": bench.curve(
            KIND_8B, [VARIANTS[n] for n in SYSTEMS], bench.users((64, 128, 256, 384, 512)), loads.prefill_heavy
        ),
    }


def figure_19(bench: Bench) -> dict[str, Any]:
    """A share of the requests comes without a hint."""
    users = 256 if bench.quick else 512
    rows = []
    for missed in (0.0, 1.0) if bench.quick else (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        rows.append(
            {"missed": missed}
            | bench.mean_row(KIND_13B, users, VARIANTS["balanced"], Habits(missed=missed, expected=False))
        )
    others = [bench.mean_row(KIND_13B, users, VARIANTS[n]) for n in ("infercept", "sticky")]
    return {"model": KIND_13B.model, "users": users, "seeds": bench.seeds, "rows": rows, "stateful": others}


def figure_20(bench: Bench) -> dict[str, Any]:
    """Spurious hints."""
    users = 256 if bench.quick else 512
    rows = []
    for spurious in (0.0, 0.6) if bench.quick else (0.0, 0.2, 0.4, 0.6, 0.9):
        habits = Habits(spurious=spurious, expected=False)
        rows.append({"spurious": spurious} | bench.mean_row(KIND_13B, users, VARIANTS["balanced"], habits))
    return {"model": KIND_13B.model, "users": users, "seeds": bench.seeds, "rows": rows}


def figure_21(bench: Bench) -> dict[str, Any]:
    """A share of the sessions has priority: vLLM's priority scheduling and ours."""
    users = 256 if bench.quick else 512
    rows = []
    for share in (0.3,) if bench.quick else (0.1, 0.3, 0.5):
        for name in ("recompute", "balanced"):
            f = bench.run(KIND_13B, users, VARIANTS[name], urgent=share).figures
            for priority, who in (("-1", "prioritised"), ("0", "regular")):
                its = f["by_priority"][priority]
                rows.append(
                    {"share": share, "system": name, "who": who}
                    | {k: its[k]["mean"] for k in ("tpot_s", "ttft_s", "normalised_s")}
                )
    return {"model": KIND_13B.model, "users": users, "rows": rows}


# ---- systems that the paper does not compare -----------------------------------------------------------------------
def arms(bench: Bench, kind: NodeKind, users: Sequence[int]) -> dict[str, Any]:
    """vLLM with prefix caching, InferCept and LMCache with an SSD, and ours without hints, without moves, and without
    both."""
    return {
        "model": kind.model,
        "seeds": bench.seeds,
        "rows": bench.mean_curve(kind, [VARIANTS[n] for n in ARMS], bench.users(users)),
    }


Figure = Callable[[Bench], dict[str, Any]]


def busy(figure: Figure) -> Figure:
    """The figure with users as busy as the paper's."""
    return lambda bench: figure(replace(bench, load=loads.busy))


#: The paper's figures.
PAPERS: dict[str, Figure] = {
    "11": figure_11, "12": figure_12, "15": figure_15, "1": figure_1, "17": figure_17, "18": figure_18, "13": figure_13,
    "19": figure_19, "20": figure_20, "21": figure_21, "16": figure_16, "14": figure_14, "6": figure_6, "2": figure_2,
    "4": figure_4, "5": figure_5,
}  # fmt: skip
_ARMS: dict[str, Figure] = {
    "arms-8b": lambda bench: arms(bench, KIND_8B, (512, 1536)),
    "arms-13b": lambda bench: arms(bench, KIND_13B, (128, 256, 512)),
}
_BUSY = {f"{name}-busy": busy((PAPERS | _ARMS)[name]) for name in ("1", "11", "12", "15", "17", "arms-8b", "arms-13b")}
FIGURES = PAPERS | _ARMS | _BUSY
