"""Watches the vLLM server: whether it serves, what it serves, and how its engine fares.

A server that comes up is asked for its model and its routes, and computes one token. That shows that our key is good,
whether it schedules by priority, and whether it has the connector. Then its health and its figures are read, twice a
second while it has requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

from runtime import telemetry
from sidecar.client import ServerGone, ServerSilent, VllmClient
from sidecar.core import samples
from sidecar.core.flights import Flights
from sidecar.core.pace import UNKNOWN_PREFILL_TOKEN_S, Pace
from sidecar.core.routes import Route, routes_of
from sidecar.core.samples import Sample
from sidecar.core.served import Facts, Unfit, facts_of, one_token
from sidecar.core.server_state import ServerState

log = telemetry.logger("sidecar.watching")
#: Seconds between looks: at a server that is down, has requests, has none.
_DOWN_S, _BUSY_S, _IDLE_S = 0.25, 0.5, 1.0
#: For the first token, which may compile kernels; and for a token that wakes an idle engine.
_FIRST_TOKEN_S, _WAKE_S = 300.0, 30.0
#: Shortest time between two tokens that wake it.
_WAKE_REST_S = 0.2
#: How long figures may lag behind an answer.
_LAG_S, _LOOK_AGAIN_S = 10.0, 0.1


class Watching:
    """See the module. changed: called when `up` has changed. cached: whether the server should have the connector."""

    def __init__(
        self, client: VllmClient, model: str, flights: Flights, changed: Callable[[], None], cached: bool
    ) -> None:
        self._client, self._model, self._flights, self._changed, self._cached = client, model, flights, changed, cached
        self._state, self.pace = ServerState(), Pace()
        self.routes: dict[str, Route] = {}
        #: What it serves; None: it was never up.
        self.facts: Facts | None = None
        self.sample: Sample | None = None
        #: Whether it has the connector, and whether it schedules by priority.
        self.transfers = self.prioritises = False
        #: Why it is down, for callers and the log.
        self.why = "it is starting"
        self._again, self._wake_asked = asyncio.Event(), asyncio.Event()
        self.wakes = 0

    @property
    def up(self) -> bool:
        """Whether it serves."""
        return self._state.up

    @property
    def stalled_s(self) -> float:
        """See `ServerState.stalled_s`."""
        flights = self._flights
        longest_s = flights.prompt_tokens() * (self.pace.prefill_token_s or UNKNOWN_PREFILL_TOKEN_S)
        return self._state.stalled_s(_now(), flights.oldest_s, longest_s)

    def heard(self) -> None:
        """The server has sent a part of an answer."""
        now = _now()
        self._state.answered(now)
        self._state.moved(now)

    def look_at_once(self) -> None:
        """Something was lost: look now."""
        self._again.set()

    def wake(self) -> None:
        """The connector asks for a step of the engine."""
        self._wake_asked.set()

    async def engine_is_dead(self) -> bool:
        """Ask now, after an answer that says so or none. A server that is silent may live."""
        try:
            status, _ = await self._ask("/health")
        except ServerGone:
            self._falls("it cannot be reached")
            return True
        except ServerSilent:
            return False
        if status != 200:
            self._falls(f"its engine is dead (/health answered {status})")
        return status != 200

    async def run(self) -> None:
        """Watch, for ever."""
        await asyncio.gather(self._run_looks(), self._run_wakes())

    async def _run_looks(self) -> None:
        while True:
            self._again.clear()
            await self._look()
            rest_s = _DOWN_S if not self.up else _BUSY_S if len(self._flights) else _IDLE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._again.wait()

    async def _run_wakes(self) -> None:
        while True:
            await self._wake_asked.wait()
            self._wake_asked.clear()
            if self.up:
                with contextlib.suppress(ServerGone, ServerSilent, Unfit):
                    await self._token(priority=None, timeout_s=_WAKE_S)
                    self.wakes += 1
            await asyncio.sleep(_WAKE_REST_S)

    async def _look(self) -> None:
        try:
            if await self.engine_is_dead():
                return
            if not self.up:
                await self._rise()
            await self._read_figures()
        except (ServerGone, ServerSilent) as e:
            self.why = self.why if self.up else str(e)
        except Unfit as e:
            if self.why != str(e):
                log.error("this server cannot be served", reason=str(e))
            self.why = str(e)

    async def _ask(self, path: str) -> tuple[int, bytes]:
        self._state.asks(_now())
        found = await self._client.ask(path)
        self._state.answered(_now())
        return found

    # ---- coming up ---------------------------------------------------------------------------------------------
    async def _rise(self) -> None:
        """Learn what it serves; it is up afterwards. Raises Unfit, ServerGone, ServerSilent."""
        facts = facts_of(*await self._ask("/v1/models"), self._model)
        if self.facts is not None and facts.max_tokens != self.facts.max_tokens:
            raise RuntimeError(
                f"the server came back with a context of {facts.max_tokens} tokens instead of {self.facts.max_tokens}; "
                "the sidecar starts again to report that"
            )
        status, described = await self._ask("/openapi.json")
        if status != 200:
            raise Unfit(
                f"its /openapi.json answered {status}, and its routes are read from there; start it without "
                "--disable-fastapi-docs"
            )
        self.routes = routes_of(_json(described))
        if not any(route.computes for route in self.routes.values()):
            raise Unfit("it has none of the routes that are passed to a vLLM server; see docs/vllm.md")
        before = await self._sample()
        self.prioritises = await self._token(priority=1, timeout_s=_FIRST_TOKEN_S)
        if not self.prioritises and not await self._token(priority=None, timeout_s=_FIRST_TOKEN_S):
            raise Unfit("it refuses a request for one token; see its log")
        self.transfers = self._cached and await self._has_connector(before)
        self.facts = facts
        self._state.rises(_now())
        log.info(
            "the vLLM server serves",
            model=self._model,
            max_tokens=facts.max_tokens,
            routes=sorted(self.routes),
            connector=self.transfers,
            priority=self.prioritises,
        )
        if self._cached and not self.transfers:
            log.warning(
                "this server has no connector (--kv-transfer-config), so no session's KV is kept beyond its own "
                "memory; start it with the flags that `upbeat vllm-config` prints"
            )
        self._changed()

    async def _token(self, priority: int | None, timeout_s: float) -> bool:
        """Have one token computed. Whether the server took the request. Raises ServerGone, ServerSilent, Unfit."""
        path, body = one_token(self._model, self.routes, priority)
        status, answer = await self._client.ask(path, json.dumps(body).encode(), timeout_s)
        if status >= 500:
            raise ServerGone(f"POST {path} answered {status}: {answer[:200]!r}", sent=True)
        return status == 200

    async def _has_connector(self, before: Sample | None) -> bool:
        """Whether the token was looked for outside of vLLM's own cache. Without figures that say so: true. before: its
        figures before that token."""
        if before is None:
            return True
        until = _now() + _LAG_S
        while _now() < until:
            after = await self._sample()
            if after is None or after.external_queries > 0:
                return True
            if after.ended > before.ended:
                return False
            await asyncio.sleep(_LOOK_AGAIN_S)
        return True

    def _falls(self, why: str) -> None:
        if self.up:
            log.warning("the vLLM server is down", reason=why)
        was_up, self.why, self.sample = self.up, why, None
        self._state.falls()
        if was_up:
            self._changed()

    # ---- figures -----------------------------------------------------------------------------------------------
    async def _sample(self) -> Sample | None:
        status, text = await self._ask("/metrics")
        return samples.read(text.decode(errors="replace")) if status == 200 else None

    async def _read_figures(self) -> None:
        last, self.sample = self.sample, await self._sample()
        # Without figures, or requests, there is nothing by which to judge the engine.
        if self.sample is None or last is None or self.sample.moved(last) or not len(self._flights):
            self._state.moved(_now())
        if self.sample is not None:
            self.pace.seen(self.sample)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _now() -> float:
    return asyncio.get_running_loop().time()
