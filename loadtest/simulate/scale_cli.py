"""`upbeat autoscale --simulate TRACE`: what a policy would have done over a trace, beside a fleet of a fixed size.

Everything printed is simulated; nothing is started or stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from contracts.errors import ConfigError
from loadtest.figures import Slo
from loadtest.report import provenance, write_json
from loadtest.simulate.presets import node_kind
from loadtest.simulate.scale_report import most_nodes, stretch_s, stretches, whole
from loadtest.simulate.scaled import Ran, ScaledRun, run_scaled
from loadtest.simulate.scenario import scripts, trace_sessions
from loadtest.simulate.turns import coarsened, most_tokens
from loadtest.simulate.users import Script
from runtime.config import Config
from scheduler.core.scale_policy import Policy, policy_of
from scheduler.core.scale_signals import TPOT, TTFT

#: Changes to the configured policy, by name.
POLICIES: Mapping[str, Mapping[str, float]] = {
    "configured": {},
    "careful": {"target_utilisation": 0.45, "down_window_s": 900.0},
    "cheap": {"target_utilisation": 0.8, "down_window_s": 120.0},
}
NOTE = (
    "SIMULATED in virtual time: production's policy, signals, scheduler, engine and store cores; step and transfer "
    "times from the model's latency profile. Not modelled: failures, the time of the network between processes, "
    "prefixes that sessions share, write-back of leaving nodes to a slow bucket."
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line. overrides: of the policy, those that were given."""

    trace: Path
    policies: str
    overrides: Mapping[str, float]
    start: int | None
    fixed: int | None
    startup_s: float
    preset: str
    ttft_s: float
    tpot_s: float
    minutes: float | None
    time_scale: float
    length_scale: float
    hints: bool
    seed: int


def simulate(wanted: Wanted, config: Config, out: Path | None, as_json: bool) -> None:
    """Run and print. Raises typer.Exit with status 1 and one line for what cannot be read."""
    console = Console(stderr=as_json)
    try:
        document = simulated(wanted, config, console)
    except (ConfigError, OSError, ValueError) as e:
        Console(stderr=True).print(f"[red]upbeat autoscale:[/red] {e}", soft_wrap=True)
        raise typer.Exit(1) from e
    if out is not None:
        write_json(out, document)
    if as_json:
        typer.echo(json.dumps(document, indent=2))
    else:
        show(document, console)


def simulated(wanted: Wanted, config: Config, console: Console) -> dict[str, Any]:
    """The document. Raises ValueError and OSError for what cannot be read."""
    kind, slo = node_kind(wanted.preset), Slo(wanted.ttft_s, wanted.tpot_s)
    policies = {name: _policy(name, wanted, config) for name in _names(wanted.policies)}
    fits = min(kind.max_tokens, most_tokens(coarsened(kind, 2, _LONG)))
    said = scripts(
        trace_sessions(wanted.trace),
        seed=wanted.seed,
        time_scale=wanted.time_scale,
        length_scale=wanted.length_scale,
        max_tokens=fits,
    )
    limit_s = math.inf if wanted.minutes is None else wanted.minutes * 60
    said = _within(said, limit_s)
    if not said:
        raise ValueError(f"{wanted.trace}: no conversation fits the model's {fits} tokens; give --length-scale")
    first = next(iter(policies.values()))
    run = ScaledRun(
        kind,
        first.min_nodes,
        None,
        slo,
        wanted.startup_s,
        wanted.hints,
        wanted.seed,
        limit_s,
        pieces=(2, _chunk_tokens(said)),
    )
    ran: dict[str, Ran] = {}
    for name, policy in policies.items():
        start = wanted.start if wanted.start is not None else policy.min_nodes
        with console.status(f"{name}: simulating ..."):
            ran[name] = run_scaled(replace(run, nodes=start, policy=policy), said)
    size = wanted.fixed if wanted.fixed is not None else max(most_nodes(each) for each in ran.values())
    with console.status(f"a fleet of {size}: simulating ..."):
        fixed = run_scaled(replace(run, nodes=size), said)
    # All are paid for until the last turn of the slowest has ended.
    until_s = max(each.until_s for each in (*ran.values(), fixed))
    length_s = stretch_s(until_s)
    return provenance() | {
        "simulated": True,
        "note": NOTE,
        "settings": {
            "trace": wanted.trace.name,
            "preset": kind.name,
            "conversations": len(said),
            "turns": sum(len(script.turns) for script in said),
            "startup_s": wanted.startup_s,
            "ttft_s": wanted.ttft_s,
            "tpot_s": wanted.tpot_s,
            "minutes": wanted.minutes,
            "time_scale": wanted.time_scale,
            "length_scale": wanted.length_scale,
            "hints": wanted.hints,
            "seed": wanted.seed,
            "stretch_s": length_s,
        },
        "policies": {
            name: {
                "policy": asdict(policies[name]),
                **whole(each, slo, until_s),
                "stretches": stretches(each, slo, until_s, length_s),
            }
            for name, each in ran.items()
        },
        "fixed": {"size": size, **whole(fixed, slo, until_s), "stretches": stretches(fixed, slo, until_s, length_s)},
    }


#: The longest chunks of simulated nodes, in tokens.
_LONG = 1024


def _chunk_tokens(said: list[Script]) -> int:
    """Tokens of a chunk: longer where prompts are long, so that a prompt has about as many chunks."""
    turns = [turn for script in said for turn in script.turns]
    mean = sum(turn.new_tokens for turn in turns) / len(turns)
    return next(size for size in (256, 512, _LONG) if size >= min(mean / 8, _LONG))


def _within(said: list[Script], limit_s: float) -> list[Script]:
    """Conversations with their turns before `limit_s`."""
    cut = [replace(each, turns=tuple(t for t in each.turns if t.arrival_s < limit_s)) for each in said]
    return [each for each in cut if each.turns]


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    if not names:
        raise ValueError(f"no policy given; there are {', '.join(POLICIES)}")
    return names


def _policy(name: str, wanted: Wanted, config: Config) -> Policy:
    settings = config.autoscale.model_dump() | dict(POLICIES[name]) | dict(wanted.overrides)
    return policy_of(settings, config.nodes.count)


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print the document as tables."""
    settings, fixed = document["settings"], document["fixed"]
    console.print(document["note"], style="yellow", soft_wrap=True)
    for name, policy in document["policies"].items():
        console.print(
            f"\n[bold]{name}[/bold]: target {policy['policy']['target_utilisation']:g}, "
            f"{policy['policy']['min_nodes']} to {policy['policy']['max_nodes']} nodes of {settings['preset']}, "
            f"{settings['startup_s']:g} s to start one; {settings['trace']}, {settings['turns']} turns; "
            f"TTFT {settings['ttft_s']:g} s, TPOT {settings['tpot_s'] * 1000:g} ms (simulated)",
            soft_wrap=True,
        )
        console.print(_table(policy["stretches"], fixed["stretches"]))
        console.print(_summary(policy, fixed), soft_wrap=True)


def _table(by_stretch: list[dict[str, Any]], fixed: list[dict[str, Any]]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    headings = (
        "minutes",
        "requests",
        "load",
        "nodes",
        "TTFT p99",
        "TTFT kept",
        "TPOT kept",
        "moved",
        "fixed: TTFT kept",
    )
    for number, heading in enumerate(headings):
        made.add_column(heading, justify="right" if number else "left")
    for of, other in zip(by_stretch, fixed, strict=True):
        made.add_row(
            f"{of['begin_s'] / 60:.0f}-{of['end_s'] / 60:.0f}",
            str(of["requests"]),
            "-" if of["load"] is None else f"{of['load']:.2f}",
            f"{of['nodes']:.1f}",
            "-" if of["ttft_s"]["p99"] is None else f"{of['ttft_s']['p99']:.2f} s",
            _percent(of["attainment"][TTFT]),
            _percent(of["attainment"][TPOT]),
            str(of["caches_moved"]),
            _percent(other["attainment"][TTFT]),
        )
    return made


def _summary(policy: Mapping[str, Any], fixed: Mapping[str, Any]) -> str:
    hours, fixed_hours = policy["node_hours"], fixed["node_hours"]
    return (
        f"{hours:.2f} node-hours, {policy['nodes']['least']} to {policy['nodes']['most']} nodes; TTFT kept "
        f"{_percent(policy['attainment'][TTFT])}, TPOT {_percent(policy['attainment'][TPOT])}; "
        f"{policy['caches_moved']} caches moved, {policy['caches_moved_as_their_node_left']} as their node left\n"
        f"{fixed['size']} nodes all the time: {fixed_hours:.2f} node-hours ({hours / fixed_hours - 1:+.0%} with the "
        f"policy); TTFT kept {_percent(fixed['attainment'][TTFT])}, TPOT {_percent(fixed['attainment'][TPOT])}; "
        f"{fixed['caches_moved']} caches moved"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
