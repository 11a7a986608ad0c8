"""Two vLLM nodes under a trace: Upbeat, LMCache and vLLM alone, by `upbeat bench compare`, and the sweep before it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import servers
from rich.console import Console
from servers import Setting, target_file

from loadtest.compare.cli import watched, without_outcomes
from loadtest.compare.load import Workload, read_workload
from loadtest.compare.run import Comparison
from loadtest.compare.settings import TargetFile, WorkloadSection
from loadtest.report import write_json
from loadtest.workload import longest_tokens

SWEEP = servers.HERE / "sweep.json"
#: LMCache's disk: `Programs` gives each server a scratch folder.
_DISK = Path("${scratch}")
#: By name; ratios are to the first of a run. LMCache has its disk, as ours have their SSD, but for `-memory`.
TARGETS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "upbeat": servers.upbeat,
    "upbeat-unhinted": lambda s: servers.upbeat(s, hints=False),
    "vllm-sticky": lambda s: servers.bare(s, "sticky"),
    "vllm": servers.bare,
    "lmcache-sticky": lambda s: servers.lmcache(s, "sticky", disk=_DISK),
    "lmcache": lambda s: servers.lmcache(s, disk=_DISK),
    "lmcache-memory-sticky": lambda s: servers.lmcache(s, "sticky"),
    "lmcache-256-sticky": lambda s: servers.lmcache(s, "sticky", disk=_DISK, chunk_tokens=servers.DISK_CHUNK_TOKENS),
}
DEFAULT = ("upbeat", "vllm-sticky", "vllm", "lmcache-sticky", "lmcache")
#: Peers whose best value the sweep looks for. Ours then gets the same value.
SWEPT = ("vllm-sticky", "lmcache-sticky")
TTFT, P95, RATE, TOKENS = "TTFT, mean", "TTFT, p95", "requests/s", "output tokens/s"


@dataclass(frozen=True)
class Claim:
    """met: None if it was not shown."""

    text: str
    found: str
    met: bool | None


def load_section(given: Any, model: Path) -> WorkloadSection:
    """A closed loop of users with the trace's conversations of at least three turns."""
    source: dict[str, Any] = (
        {"trace": given.trace.absolute()}
        if given.trace
        else {"generate": {"sessions": 600, "mean_prompt_tokens": 9000, "mean_turns": 5}}
    )
    return WorkloadSection.model_validate(
        source
        | {
            "requests": 4000,
            "min_turns": 3,
            "loop": "closed",
            "users": given.users,
            "requests_per_user": given.requests_per_user,
            "seconds": given.seconds,
            "begin_within_s": given.begin_within,
            "warm_up_s": given.warm_up,
            "time_scales": [given.time_scale],
            "max_context_tokens": given.max_context,
            "model_directory": model,
            "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
            "seed": given.seed,
        }
    )


def session_tokens(load: Workload) -> float:
    """Tokens of KV of a live session: the mean over the trace's turns, each after its answer."""
    return statistics.fmean(
        longest_tokens([replace(session, turns=session.turns[: number + 1])], load.length_scale, None)
        for session in load.sessions[:200]
        for number in range(len(session.turns))
    )


def memory_for(load: Workload, users: int, times: float, setting: Setting) -> float:
    """GiB of DRAM of a node, so that the live sessions of `users` have `times` the KV that fits HBM and DRAM of all
    nodes. Raises ValueError if HBM alone is more."""
    live = users * session_tokens(load)
    left = live / times - setting.instances * setting.kv_tokens
    if left <= 0:
        raise ValueError(
            f"{live:.0f} tokens of live sessions are less than {times:g} times what HBM alone holds; give more --users "
            "or fewer --kv-tokens"
        )
    return round(left * setting.kv_token_bytes / setting.instances / (1 << 30), 4)


def ratios(load: Workload, setting: Setting) -> dict[str, Any]:
    """By load: KV of the live sessions, and of all that begin, over HBM and DRAM of all nodes."""
    holds = setting.instances * (setting.kv_tokens + setting.dram_gib * (1 << 30) / setting.kv_token_bytes)
    mean = session_tokens(load)
    found: dict[str, Any] = {"session_tokens": round(mean), "held_tokens": round(holds)}
    for point in load.points:
        ended = [longest_tokens([held], load.length_scale, None) for held in load._held(point)]
        found[point.label] = {"live": round(point.users * mean / holds, 2), "all": round(sum(ended) / holds, 2)}
    return found


def sweep(
    load: Workload, setting: Setting, values: Sequence[int], names: Sequence[str], repeats: int, console: Console
) -> dict[str, Any]:
    """Measure the peers at each value of max-num-batched-tokens. best: the least geometric mean, over the peers, of the
    mean end-to-end latency."""
    targets = [
        target_file(f"{name} at {value}", TARGETS[name](replace(setting, batched_tokens=value)))
        for value in values
        for name in names
    ]
    made = watched(targets, load, repeats, console, {target.name: servers.FOLDER for target in targets})
    document = made.document()
    label = load.points[-1].label
    found: dict[str, dict[str, Any]] = {}
    for value in values:
        for name in names:
            summary = document["targets"][f"{name} at {value}"]["points"].get(label, {}).get("summary")
            if summary:
                kept = ("end to end, mean", TTFT, P95, RATE, TOKENS, "failed")
                found.setdefault(str(value), {})[name] = {of: summary[of] for of in kept if of in summary}
    whole = {value: of for value, of in found.items() if len(of) == len(names)}
    if not whole:
        raise ValueError(f"no value was measured on every target: {made.errors or 'interrupted'}")
    best = min(whole, key=lambda value: math.prod(of["end to end, mean"]["median"] for of in whole[value].values()))
    return servers.described() | {
        "flag": "--max-num-batched-tokens",
        "load": label,
        "found": found,
        "best": int(best),
        "interrupted": made.interrupted,
        "errors": made.errors,
    }


def best_value() -> int:
    """The sweep's. Raises ValueError without one."""
    if not SWEEP.exists():
        raise ValueError(f"{SWEEP.name} is missing: run `bench/vllm/run sweep` first, or give --batched-tokens")
    return int(json.loads(SWEEP.read_text())["best"])


def compare(
    section: WorkloadSection,
    setting: Setting,
    names: Sequence[str],
    given: Any,
    console: Console,
    kept: Path | None,
) -> dict[str, Any]:
    """Measure every target, in turns. kept: file of results so far, read with --resume."""
    load = read_workload(section)
    targets = [target_file(name, TARGETS[name](setting)) for name in names]
    before = earlier(kept, targets, load, given.repeats) if kept and given.resume else None
    if kept and before is None:
        kept.unlink(missing_ok=True)
    made = watched(
        targets,
        load,
        given.repeats,
        console,
        dict.fromkeys(names, servers.FOLDER),
        before=before,
        kept=(lambda made: keep(kept, made)) if kept else (lambda _: None),
        seconds=60 * given.minutes if given.minutes else math.inf,
    )
    document = without_outcomes(made.document()) | servers.described()
    document["kv_over_memory"] = ratios(load, setting)
    document["settings"] = asdict(setting) | {"installed": None, "time_scale": given.time_scale}
    document["claims"] = [asdict(claim) for claim in claims(document)]
    return portable(document)


def claims(document: Mapping[str, Any]) -> list[Claim]:
    """By load: TTFT and throughput of ours beside the best peer's."""
    made = []
    for point in document["points"]:
        label = point["label"]
        by_name = {name: of["points"].get(label, {}).get("summary", {}) for name, of in document["targets"].items()}
        for of, best, better in ((TTFT, min, "less"), (P95, min, "less"), (RATE, max, "more"), (TOKENS, max, "more")):
            theirs = {n: s[of]["median"] for n, s in by_name.items() if not n.startswith("upbeat") and of in s}
            ours = by_name.get("upbeat", {}).get(of, {}).get("median")
            if ours is None or not theirs:
                made.append(Claim(f"{label}: {of}, {better} than the best peer's", "not measured", None))
                continue
            name = best(theirs, key=lambda n: theirs[n])
            met = ours < theirs[name] if better == "less" else ours > theirs[name]
            made.append(
                Claim(f"{label}: {of}, {better} than the best peer's", f"{ours:.3f}, {name} {theirs[name]:.3f}", met)
            )
    return made


def portable(document: Any) -> Any:
    """The document with paths relative to the checkout; other paths become file names."""
    if isinstance(document, dict):
        return {key: portable(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [portable(value) for value in document]
    if isinstance(document, Path) or (isinstance(document, str) and document.startswith("/")):
        path = Path(document)
        return str(path.relative_to(servers.ROOT)) if path.is_relative_to(servers.ROOT) else path.name
    return document


def earlier(kept: Path, targets: list[TargetFile], load: Workload, repeats: int) -> Comparison | None:
    """Results of an earlier run of this comparison, without those of targets that have changed. Raises ValueError if
    they are of another load."""
    if not kept.exists():
        return None
    data = json.loads(kept.read_text())
    if data["workload"] != load.section.model_dump(mode="json"):
        raise ValueError(f"{kept} is of another load; give the same flags, or leave --resume out to begin anew")
    made = Comparison(targets, load, repeats)
    for target in targets:
        if data["targets"].get(target.name) == target.model_dump(mode="json"):
            made.runs[target.name], made.found[target.name] = data["runs"][target.name], data["found"][target.name]
    return made


def keep(kept: Path, made: Comparison) -> None:
    """Save results for --resume. Keeps those of targets that are not in this run."""
    workload = made.workload.section.model_dump(mode="json")
    old = json.loads(kept.read_text()) if kept.exists() else {}
    data = old if old.get("workload") == workload else {"workload": workload, "targets": {}, "runs": {}, "found": {}}
    for target in made.targets:
        if target.name in made.runs:
            data["targets"][target.name] = target.model_dump(mode="json")
            data["runs"][target.name], data["found"][target.name] = made.runs[target.name], made.found[target.name]
    write_json(kept, data)
