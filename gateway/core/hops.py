"""A request's place in an agent workflow, from its headers, and which requests of a run have ended since the last one.

From the ends the scheduler learns which request followed which. Workers report them too, but perhaps after the agent's
next request.
"""

from __future__ import annotations

from collections.abc import Mapping

from contracts.errors import InvalidRequest
from contracts.ids import check_name
from contracts.workflow import Hop, default_run

WORKFLOW, AGENT, RUN = HEADERS = ("X-Upbeat-Workflow", "X-Upbeat-Agent", "X-Upbeat-Run")
MAX_RUNS = 10_000
#: Ended requests that are remembered per run.
MAX_ENDED = 64


def hop_of(headers: Mapping[str, str], session_id: str) -> Hop | None:
    """The hop that the headers state, or None. Raises InvalidRequest naming the header that is wrong or missing."""
    said = {name: check_name(headers[name], name) for name in HEADERS if headers.get(name) is not None}
    if not said:
        return None
    for name in (WORKFLOW, AGENT):
        if name not in said:
            raise InvalidRequest(
                f"{name} is missing; {next(iter(said))} means nothing without it",
                param=name,
                code="missing_required_parameter",
            )
    return Hop(said[WORKFLOW], said[AGENT], said.get(RUN) or default_run(session_id))


class Ended:
    """Ended requests by run, until the run's next request takes them. The oldest runs are forgotten first."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str, str], list[str]] = {}

    def note(self, tenant: str, hop: Hop, request_id: str) -> None:
        """This request of the run has ended."""
        ended = self._runs.setdefault((tenant, hop.workflow, hop.run), [])
        if len(ended) < MAX_ENDED:
            ended.append(request_id)
        if len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]

    def take(self, tenant: str, hop: Hop) -> tuple[str, ...]:
        """The run's requests that have ended since the last call, oldest first."""
        return tuple(self._runs.pop((tenant, hop.workflow, hop.run), ()))
