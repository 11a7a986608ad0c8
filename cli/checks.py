"""Commands about this machine: `doctor`, `profile`, and the health check of containers (`probe`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.models import asked_models
from cli.options import Json, Models, whole_option
from cli.printing import console, fail, print_json
from cli.settings import Flags, resolve


def doctor(
    nodes: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    devices: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    model: Models = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="As for `upbeat up`.")] = None,
    engine: Annotated[str | None, typer.Option(metavar="native|vllm", help="As for `upbeat up`.")] = None,
    port: Annotated[int | None, whole_option("As for `upbeat up`.")] = None,
    data: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    config: Annotated[Path | None, typer.Option(help="As for `upbeat up`.")] = None,
    as_json: Json = False,
) -> int:
    """Check whether this machine can run a stack. The exit status is 0 when no check fails."""
    from cli.demo_memory import with_demo_memory
    from cli.doctor import examine, show
    from cli.settings import layout

    one, several = asked_models(model)
    flags = Flags(
        nodes=nodes,
        model=one,
        port=port,
        data=data,
        config=config,
        revision=revision,
        models=several,
        devices=devices,
        engine=engine,
    )
    findings = examine(with_demo_memory(layout(flags), flags))
    failed = [finding for finding in findings if finding.level == "fail"]
    if as_json:
        print_json({"ok": not failed, "findings": [{name: getattr(f, name) for name in f.__slots__} for f in findings]})
    else:
        show(console(), findings)
    return 1 if failed else 0


def profile(
    model: Annotated[str | None, typer.Option(metavar="DIR|ID", help="As for `upbeat up`.")] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="As for `upbeat up`.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute: fewer points, more noise.")] = False,
    corun: Annotated[
        bool, typer.Option("--corun", help="Also steps beside fine-tuning, on part of the cores: minutes more.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where to write it, instead of beside the model (or in --data).")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Show stored profiles; measure nothing.")] = False,
    nodes: Annotated[int | None, whole_option("As for `upbeat up`: it sets a worker's share of the cores.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="As for `upbeat up`; the SSD with this directory is measured.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration in YAML.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine computes a model and loads its KV, for workers, placement and simulations."""
    from cli import profile as profiles
    from cli.demo_memory import with_demo_chunks
    from contracts.errors import ConfigError
    from contracts.latency_profile import encode
    from runtime.profile_files import store
    from runtime.registry import registered

    flags = Flags(nodes=nodes, model=model, data=data, config=config, revision=revision)
    resolved = with_demo_chunks(resolve(flags), flags)
    if registered(resolved)[resolved.served_model].engine == "vllm":
        raise ConfigError(
            f"{resolved.served_model} runs in vLLM, whose pace its node measures as it serves; `upbeat profile` "
            "measures Upbeat's own engine: give --model"
        )
    if show:
        found = profiles.known(resolved)
    else:
        measured = profiles.measure(resolved, quick, corun, quiet=as_json)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(encode(measured))
        found = [(out or store(measured, resolved), measured)]
    for path, one in found:
        if as_json:
            print(encode(one), end="")
        else:
            profiles.show(console(), one, path)


def probe(
    address: Annotated[str, typer.Argument(help="http, https or grpc, ://host:port; or unix:PATH")],
    who: Annotated[str, typer.Argument(help="Who must answer, as in its certificate: scheduler, node-0, ...")] = "",
    alive: Annotated[bool, typer.Option("--alive", help="Any answer will do: it may be starting or draining.")] = False,
) -> int:
    """Exit with status 0 when the service at ADDRESS is healthy: the health check of containers."""
    from cli.operator import operator
    from cli.probe import healthy
    from contracts import identity

    why = healthy(address, 5.0, identity.named(who) if who else None, operator(), alive=alive)
    return fail(why, 1) if why else 0
