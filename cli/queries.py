"""Commands that call a running gateway: its state, its sessions, and hints."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any
from urllib.parse import quote

import typer

from cli import fleet
from cli.client import Gateway, model_path, session_pages, session_path
from cli.completion import known_sessions
from cli.models import show_models
from cli.options import DEFAULT_URL, Json, Key, Url, number_option, whole_option
from cli.printing import console, print_json
from contracts.errors import ConfigError

_Session = Annotated[str, typer.Argument(metavar="SESSION", autocompletion=known_sessions)]
_SessionOrNone = Annotated[str, typer.Argument(metavar="[SESSION]", show_default=False, autocompletion=known_sessions)]


def status(url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> int:
    """What the fleet does now. The exit status is 0 when every node serves."""
    gateway = Gateway(url, key or None)
    all_serve = gateway.ask("GET", "/ready?all=1").status == 200
    data = gateway.call("GET", "/v1/fleet")
    if as_json:
        print_json({"url": url, **data, "all_serve": all_serve})
    else:
        fleet.show_fleet(console(), all_serve, data)
    return 0 if all_serve else 1


def models(
    remove: Annotated[
        str, typer.Option(metavar="NAME", help="Stop serving a model that a fine-tuning job made.", show_default=False)
    ] = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """The registered models: state and nodes, bytes of weights and KV, idle time, priority, latency objectives."""
    gateway = Gateway(url, key or None)
    if remove:
        answer = gateway.call("DELETE", f"/v1/models/{quote(remove, safe='')}")
        if as_json:
            print_json(answer)
        else:
            console().print(f"removed: {remove}; its nodes are started again one by one", markup=False)
        return
    data = gateway.call("GET", "/v1/models")
    if as_json:
        print_json(data)
    else:
        show_models(console(), data["data"])


def top(
    every: Annotated[float, number_option("Seconds between two samples.")] = 2.0,
    rounds: Annotated[int, whole_option("Number of samples; 0: until Ctrl-C.")] = 0,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Show each node's KV activity: memory, reads, hits, hints, evictions; models that share a device; the latest
    sessions."""
    from cli.top import records, watch

    if every <= 0 or rounds < 0:
        raise ConfigError("--every must be more than 0 and --rounds at least 0; give, say, --every 2")
    gateway = Gateway(url, key or None)
    if not as_json:
        watch(console(), gateway, every, rounds)
        return
    for record in records(gateway, every, rounds):
        print(json.dumps(record), flush=True)


def sessions(
    session_id: Annotated[
        str, typer.Argument(help="One session: where its KV is.", show_default=False, autocompletion=known_sessions)
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000, help="Number of sessions to list, most recently used first.", show_default="100"
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="List every session, by id; with --json a line a page.")
    ] = False,
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """List sessions, or show one tier by tier."""
    gateway = Gateway(url, key or None)
    if session_id:
        data = gateway.call("GET", session_path(session_id))
        (print_json if as_json else partial(fleet.show_session, console()))(data)
        return
    pages = (
        session_pages(gateway)
        if everything
        else [gateway.call("GET", f"/v1/sessions?limit={limit}" if limit else "/v1/sessions")]
    )
    for page in pages:
        if as_json and everything:
            print(json.dumps(page), flush=True)
        elif as_json:
            print_json(page)
        else:
            fleet.show_sessions(console(), page, partial(gateway.call, "GET", "/v1/fleet"), last=everything)


def explain(
    session_id: _SessionOrNone = "",
    model: Annotated[
        str, typer.Option(help="Explain a model: when its weights came and left.", show_default=False)
    ] = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Explain where a session's last turns and hints were placed, or when a model's weights came and left; and why."""
    from cli.explain import lines
    from cli.explain_model import lines as lines_of_model

    if bool(session_id) == bool(model):
        raise ConfigError("name one thing to explain: `upbeat explain SESSION`, or `upbeat explain --model NAME`")
    path = f"{session_path(session_id)}/placement" if session_id else model_path(model)
    data = Gateway(url, key or None).call("GET", path)
    if as_json:
        print_json(data)
    else:
        console().print("\n".join(lines(data) if session_id else lines_of_model(data)))


def advise(
    session_id: _Session,
    expected_arrival: Annotated[float | None, number_option("Seconds until the request comes.")] = None,
    priority: Annotated[int, whole_option("Lower is more urgent.")] = 0,
    ttl_s: Annotated[
        float | None, number_option("Seconds after the expected arrival until the hint loses its rank.")
    ] = None,
    node: Annotated[str, typer.Option(help="Pin this node, such as node-1.", show_default=False)] = "",
    url: Url = DEFAULT_URL,
    key: Key = "",
    as_json: Json = False,
) -> None:
    """Send a hint: the session is about to send a request, so its KV starts moving now."""
    body: dict[str, Any] = {"session_id": session_id, "expected_arrival": expected_arrival, "priority": priority}
    if ttl_s is not None:
        body["ttl_s"] = ttl_s
    answer = Gateway(url, key or None).call("POST", "/v1/advisory", body, {"x-upbeat-node": node} if node else None)
    _show_accepted(answer, session_id, as_json)


def invalidate(session_id: _Session, url: Url = DEFAULT_URL, key: Key = "", as_json: Json = False) -> None:
    """Withdraw a session's hint; what was fetched for it is evicted first."""
    answer = Gateway(url, key or None).call("POST", "/v1/invalidate", {"session_id": session_id})
    _show_accepted(answer, session_id, as_json)


def _show_accepted(answer: Any, session_id: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        console().print(f"accepted: {session_id}")
