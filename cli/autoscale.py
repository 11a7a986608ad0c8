"""`upbeat autoscale`: how many nodes the fleet should have; with `--simulate`, what a policy would have done."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cli.client import Gateway
from cli.fleet import table
from cli.options import DEFAULT_URL, Json, Key, Url, number_option, whole_option
from cli.printing import console, print_json
from contracts.errors import ConfigError

#: With --simulate, where neither the flag nor the configuration names it.
_MOST = 16


def autoscale(
    context: typer.Context,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Replay a trace (formats of `upbeat bench`) through the policy, in virtual time.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAMES", help="One or several with commas: configured, careful, cheap.")
    ] = "configured",
    min_nodes: Annotated[int | None, typer.Option("--min", min=1, help="Fewest nodes.", show_default=False)] = None,
    max_nodes: Annotated[
        int | None, typer.Option("--max", min=1, max=4096, help="Most nodes.  [default: 16]", show_default=False)
    ] = None,
    target_utilisation: Annotated[
        float | None,
        typer.Option(min=0.01, max=1.0, help="Share of the fleet that work should use.", show_default=False),
    ] = None,
    down_window_s: Annotated[
        float | None,
        typer.Option(min=0.0, max=86_400.0, help="How long a smaller fleet must be wanted.", show_default=False),
    ] = None,
    start: Annotated[int | None, whole_option("Nodes at the start.  [default: --min]")] = None,
    fixed: Annotated[int | None, whole_option("Nodes of the fleet to compare.  [default: the policy's most]")] = None,
    startup_s: Annotated[float, number_option("From the order of a node until it serves, in seconds.")] = 120.0,
    preset: Annotated[
        str, typer.Option(help="Kind of node, as in `upbeat simulate`, or the file of a profile of `upbeat profile`.")
    ] = "a100-llama-3.1-8b",
    ttft_s: Annotated[float, number_option("Target of the first token, in seconds.")] = 2.0,
    tpot_s: Annotated[float, number_option("Target of each further token, in seconds.")] = 0.05,
    minutes: Annotated[float | None, number_option("Replay only the trace's first minutes.")] = None,
    time_scale: Annotated[float, number_option("The trace's times are multiplied by this.")] = 1.0,
    length_scale: Annotated[float, number_option("The trace's lengths are multiplied by this, at most 1.")] = 1.0,
    hints: Annotated[bool, typer.Option(help="Whether users' typing is hinted.")] = True,
    seed: Annotated[int, whole_option("Equal seeds give equal runs.")] = 1,
    config: Annotated[
        Path | None, typer.Option(help="With --simulate: whose section `autoscale` is the policy.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --simulate: also write the JSON here.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """How many nodes the fleet should have now, and why; with --simulate, what a policy would have done over a trace.

    Nothing is started or stopped.
    """
    if simulate is None:
        _only_live(context)
        page = Gateway(url, key or None).call("GET", "/v1/scale")
        if as_json:
            print_json(page)
        else:
            show(console(), page)
        return
    for flag, value in (
        ("--start", start),
        ("--fixed", fixed),
        ("--ttft-s", ttft_s),
        ("--tpot-s", tpot_s),
        ("--minutes", minutes),
        ("--time-scale", time_scale),
        ("--length-scale", length_scale),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value} must be above 0")
    if not 0 <= startup_s <= 86_400:
        raise ConfigError(f"--startup-s {startup_s} must be between 0 and 86400 seconds")
    if length_scale > 1:
        raise ConfigError(f"--length-scale {length_scale} must be at most 1: a trace's prompts cannot be made longer")
    from loadtest.simulate import scale_cli
    from runtime.config_file import load_config

    said = load_config(config)
    most = max_nodes or said.autoscale.max_nodes or max(_MOST, min_nodes or 1)
    overrides: dict[str, Any] = {
        "min_nodes": min_nodes,
        "max_nodes": most,
        "target_utilisation": target_utilisation,
        "down_window_s": down_window_s,
    }
    wanted = scale_cli.Wanted(
        trace=simulate,
        policies=policy,
        overrides={name: value for name, value in overrides.items() if value is not None},
        start=start,
        fixed=fixed,
        startup_s=startup_s,
        preset=preset,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        minutes=minutes,
        time_scale=time_scale,
        length_scale=length_scale,
        hints=hints,
        seed=seed,
    )
    scale_cli.simulate(wanted, said, out, as_json)


_LIVE = ("url", "key", "as_json", "simulate")


def _only_live(context: typer.Context) -> None:
    """Raises ConfigError for a flag that only means something with --simulate."""
    for name in context.params:
        if name not in _LIVE and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            flag = {"min_nodes": "min", "max_nodes": "max"}.get(name, name.replace("_", "-"))
            raise ConfigError(f"--{flag} is of a simulation; give --simulate TRACE too, or set it in `autoscale`")


def show(out: Console, page: Mapping[str, Any]) -> None:
    """Print the page of `GET /v1/scale`."""
    coming = f", {page['starting_nodes']} starting" if page["starting_nodes"] else ""
    out.print(f"{page['desired_nodes']} nodes wanted ({page['why']}); {page['nodes']} serve{coming}")
    if page["incomplete"]:
        out.print(f"nothing is changed: {page['incomplete']}")
    policy, needed, slo = page["policy"], page["kv_needed"], page["slo"]
    used = "-" if page["utilisation"] is None else f"{page['utilisation']:.0%}"
    kept = "-" if slo["attainment"] is None else f"{slo['attainment']:.1%} of {slo['turns']}"
    out.print(
        f"utilisation {used} (target {policy['target_utilisation']:.0%}), KV needed: HBM {needed['hbm']:.0%}, DRAM "
        f"{needed['dram']:.0%}, SLO kept: {kept}, limits: {policy['min_nodes']} to {policy['max_nodes']} nodes"
    )
    made = table("model", "nodes", "work a node", "arriving a second", "TTFT kept", "TPOT kept")
    for of in page["models"]:
        shares = [of["attainment"].get(target) for target in ("ttft", "tpot")]
        made.add_row(
            of["model"],
            str(of["nodes"]),
            f"{of['work_s_a_node']:.2f} s",
            f"{of['arriving_work']:.2f} s",
            *("-" if share is None else f"{share:.1%}" for share in shares),
        )
    out.print(made)
