"""`upbeat logs`: what the services of this machine have logged, of one session or request if wanted. Logs hold hashes
of session ids, which this command computes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from cli.options import whole_option
from cli.settings import Flags, layout
from contracts.cluster import log_key
from contracts.errors import ConfigError, InvalidRequest
from contracts.ids import DEFAULT_TENANT, SessionKey, check_session_id
from runtime.config_file import cluster_secret, secret_file
from runtime.telemetry import hashed_id

#: What the ids of a request's choices and attempts begin with: its own.
_REQUEST = re.compile(r"([a-z]+[-_])?[0-9a-f]{24}")
#: Longer lines are passed over.
_LINE_CHARS = 1 << 20


class Line(NamedTuple):
    """A line of a log. fields: empty unless it is a JSON object."""

    text: str
    fields: dict[str, Any]


def logs(
    session: Annotated[str, typer.Option(metavar="ID", help="Only of this session.", show_default=False)] = "",
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Whose session it is.")] = DEFAULT_TENANT,
    request: Annotated[
        str, typer.Option(metavar="ID", help="Only of this request: X-Request-Id of its answer.", show_default=False)
    ] = "",
    port: Annotated[int | None, whole_option("The gateway's port, as of `upbeat up`.  [default: 8080]")] = None,
    data: Annotated[Path | None, typer.Option(help="As of `upbeat up`.  [default: data]")] = None,
    config: Annotated[Path | None, typer.Option(help="As of `upbeat up`.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="As of `upbeat up`.  [default: .cache/run]")] = None,
) -> None:
    """Print what the services of this machine logged, oldest first; with --session also of its requests."""
    asked = layout(Flags(port=port, data=data, config=config, run_dir=run_dir))
    folder = asked.run_dir / "logs"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not there; give the --run-dir or the --port of the stack")
    lines: Iterable[Line] = read(folder)
    if session:
        if not secret_file(asked.data).is_file():
            raise ConfigError(f"{secret_file(asked.data)} is not there; give the --data of the stack")
        try:
            wanted = SessionKey(tenant, check_session_id(session, "--session"))
        except InvalidRequest as e:
            raise ConfigError(str(e)) from None
        lines = of_session(list(lines), str(wanted), log_key(cluster_secret(asked.data)))
    if request:
        lines = of_request(lines, request)
    for line in sorted(lines, key=lambda line: str(line.fields.get("timestamp", ""))):
        print(line.text)


def read(folder: Path) -> Iterator[Line]:
    """The lines of all logs, each service's oldest file first."""
    for file in sorted(folder.glob("*.log*"), key=_age):
        with file.open(encoding="utf-8", errors="replace") as f:
            for text in f:
                if len(text) <= _LINE_CHARS:
                    yield Line(text.rstrip("\n"), _fields(text))


def of_session(lines: list[Line], session: str, key: bytes) -> list[Line]:
    """The lines that name the session (TENANT/ID) or one of its requests."""
    known = {session, hashed_id(key, session)}  # debug lines have the id itself
    requests = {request for line in lines if line.fields.get("session") in known for request in _requests(line)}
    return [line for line in lines if line.fields.get("session") in known or _requests(line) & requests]


def of_request(lines: Iterable[Line], wanted: str) -> Iterator[Line]:
    """The lines that name a request by its own id or by its caller's, or one of its choices or attempts."""
    ids = re.compile(rf"(?:[^/]*/)?{re.escape(wanted)}(?:/[^/]*)?(?:-[0-9]+)?(?:\.r[0-9]+)?")
    for line in lines:
        request = line.fields.get("request")
        if isinstance(request, str) and ids.fullmatch(request):
            yield line


def _requests(line: Line) -> set[str]:
    """The id of the line's request, and of the request whose attempt or choice it may be."""
    request = line.fields.get("request")
    if not isinstance(request, str):
        return set()
    begins = _REQUEST.match(request)
    return {request, begins[0]} if begins else {request}


def _age(file: Path) -> tuple[str, int]:
    name, _, age = file.name.partition(".log")
    return name, -int(age[1:]) if age[1:].isdecimal() else 0


def _fields(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
