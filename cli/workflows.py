"""`upbeat workflows`: call graphs of agent workflows, declared by users, or learned from requests or recorded runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console

from cli.client import Gateway
from cli.fleet import table
from cli.options import DEFAULT_URL, Json, Key, Url
from cli.printing import console, print_json
from contracts.errors import ConfigError, InvalidRequest
from contracts.ids import check_name
from contracts.workflow import graph_to_json, parse_graph

_Name = Annotated[str, typer.Argument(metavar="NAME")]

PROFILE_HELP = """Learn a workflow's call graph from recorded runs, and print it or declare it.

A recording has a JSON object a line, one for each request, in any order: {"run": "job-7", "agent": "qa",
"session_id": "job-7:qa", "start_s": 12.5, "end_s": 14.0}. Times are seconds on any one clock. With --json the graph is
printed as `upbeat workflows put` reads it.
"""


def commands() -> typer.Typer:
    """The group of commands."""
    group = typer.Typer(
        name="workflows",
        help="Call graphs of agent workflows: list, show, put, delete, profile.",
        add_completion=False,
        rich_markup_mode=None,
    )

    @group.command("list")
    def list_all(url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> None:
        """List the workflows that are declared or were seen in requests."""
        data = Gateway(url, key or None).call("GET", "/v1/workflows")
        if as_json:
            print_json(data)
        else:
            _show_all(console(), data["data"])

    @group.command()
    def show(name: _Name, url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> None:
        """Show a workflow's call graph: which agent follows which, how likely, how often and when."""
        data = Gateway(url, key or None).call("GET", _path(name))
        if as_json:
            print_json(data)
        else:
            _show(console(), data)

    @group.command()
    def put(
        name: _Name,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A graph in JSON: agents, edges, learn.")],
        url: Url = DEFAULT_URL,
        key: Key = "",
        as_json: Json = False,
    ) -> None:
        """Declare a workflow's call graph; what was learned about it stays."""
        _put(Gateway(url, key or None), name, _graph(file), as_json)

    @group.command()
    def delete(name: _Name, url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> None:
        """Delete a workflow, and what was learned about it."""
        data = Gateway(url, key or None).call("DELETE", _path(name))
        if as_json:
            print_json(data)
        else:
            console().print(f"deleted: {name}")

    @group.command(help=PROFILE_HELP)
    def profile(
        files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings of runs of one workflow.")],
        declare: Annotated[
            str, typer.Option("--put", metavar="NAME", help="Declare the graph as this workflow.", show_default=False)
        ] = "",
        url: Url = DEFAULT_URL,
        key: Key = "",
        as_json: Json = False,
    ) -> None:
        from loadtest.recorded_runs import as_declared, learn, read_recording

        requests = [request for file in files for request in read_recording(file)]
        if not requests:
            raise ConfigError(f"{', '.join(map(str, files))}: no request is recorded there; give a JSON object a line")
        learned, runs = learn(requests)
        graph = graph_to_json(as_declared(learned))
        if declare:
            _put(Gateway(url, key or None), declare, graph, as_json)
        elif as_json:
            print_json(graph)
        else:
            console().print(f"{len(requests)} requests in {runs} runs of {len(graph['agents'])} agents")
            console().print(_edges(graph["edges"]))

    def _put(gateway: Gateway, name: str, graph: dict[str, Any], as_json: bool) -> None:
        data = gateway.call("PUT", _path(name), graph)
        if as_json:
            print_json(data)
        else:
            console().print(f"declared: {name}, {len(graph['agents'])} agents and {len(graph['edges'])} edges")

    return group


def _path(name: str) -> str:
    try:
        return f"/v1/workflows/{quote(check_name(name, 'NAME'), safe='')}"
    except InvalidRequest as e:
        raise ConfigError(e.message) from None


def _graph(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(
            f"{file} cannot be read as JSON ({e}); give a graph, such as `upbeat workflows profile --json` prints"
        ) from e
    try:
        return graph_to_json(parse_graph(data))
    except InvalidRequest as e:
        raise ConfigError(f"{file}: {e.message}") from None


def _show_all(console: Console, workflows: list[dict[str, Any]]) -> None:
    if not workflows:
        console.print("no workflows yet")
        return
    rows = table("workflow", "declared", "agents", "edges", "requests seen")
    for w in workflows:
        agents = {a["name"] for a in w["learned"]["agents"]} | set((w["declared"] or {}).get("agents", ()))
        seen = sum(a["requests"] for a in w["learned"]["agents"])
        rows.add_row(w["id"], "yes" if w["declared"] else "no", str(len(agents)), str(len(w["edges"])), str(seen))
    console.print(rows)


def _show(console: Console, workflow: dict[str, Any]) -> None:
    seen = ", ".join(f"{a['name']} {a['requests']}" for a in workflow["learned"]["agents"]) or "none"
    declared = workflow["declared"]
    how = "not declared" if declared is None else "declared" if declared["learn"] else "declared, without learning"
    console.print(f"{workflow['id']}: {how}; requests seen: {seen}")
    console.print(_edges(workflow["edges"]))


def _edges(edges: list[dict[str, Any]]) -> Any:
    rows = table("after a request of", "comes", "probability", "calls", "delay")
    for e in edges:
        rows.add_row(e["from"], e["to"], f"{e['probability']:.0%}", f"{e['calls']:.1f}", f"{e['delay_s']:.2f} s")
    return rows
