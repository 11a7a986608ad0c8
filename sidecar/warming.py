"""Brings hinted sessions into vLLM's own cache, so that their next turn reads nothing: a request for one token behind
the session's known ones, whose KV the connector loads from the arena.

A server with requests is left alone, because nobody may be late for a hint. So one session comes at a time, while the
server is idle, and hints that end meanwhile are forgotten.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict

from contracts.ids import SessionKey
from contracts.ranges import PRIORITY
from contracts.warm_up import WarmUp, decode_warm_up
from runtime import telemetry
from sidecar.client import ServerGone, ServerSilent, VllmClient
from sidecar.core.flights import Flights
from sidecar.watching import Watching

log = telemetry.logger("sidecar.warming")
PATH = "/v1/completions"
#: Sessions that wait, the latest; seconds that one may take.
_MOST, _WARM_S = 64, 30.0
_LOOK_S = 0.02


class Warming:
    """See the module. warmed: sessions so far."""

    def __init__(self, client: VllmClient, model: str, flights: Flights, watching: Watching) -> None:
        self._client, self._model, self._flights, self._watching = client, model, flights, watching
        self._waiting: OrderedDict[SessionKey, tuple[WarmUp, float]] = OrderedDict()
        self._some = asyncio.Event()
        self.warmed = 0

    def offer(self, message: bytes) -> None:
        """A message of the connector: a hinted session is in the arena, or was erased."""
        try:
            warm_up = decode_warm_up(message)
        except ValueError as e:
            log.error("a message of no use", error=str(e))
            return
        self._waiting.pop(warm_up.session, None)
        if not warm_up.tokens:
            return
        self._waiting[warm_up.session] = warm_up, _now() + warm_up.expires_s
        while len(self._waiting) > _MOST:
            self._waiting.popitem(last=False)
        self._some.set()

    async def run(self) -> None:
        """Warm sessions up, for ever."""
        while True:
            await self._some.wait()
            while len(self._flights):  # noqa: ASYNC110 - another task's state
                await asyncio.sleep(_LOOK_S)
            if not self._waiting:
                self._some.clear()
                continue
            _, (warm_up, until_s) = self._waiting.popitem(last=False)
            watching = self._watching
            if _now() < until_s and watching.up and watching.transfers and PATH in watching.routes:
                await self._warm(warm_up)

    async def _warm(self, warm_up: WarmUp) -> None:
        began_s = _now()
        try:
            status, answer = await self._client.ask(PATH, json.dumps(self._body(warm_up)).encode(), _WARM_S)
        except (ServerGone, ServerSilent) as e:
            log.warning("a session was not warmed up", session=str(warm_up.session), reason=str(e))
            return
        if status != 200:
            log.warning("a session was not warmed up", session=str(warm_up.session), reason=answer[:200])
            return
        self.warmed += 1
        self._watching.pace.own(_now() - began_s)

    def _body(self, warm_up: WarmUp) -> dict[str, object]:
        session, tokens = warm_up.session, list(warm_up.tokens)
        said = {"tenant": session.tenant, "session": session.session_id, "warms": True}
        # vLLM computes at least the last token of a prompt: one more than is known, so that the known ones are loaded.
        body = {
            "model": self._model,
            "prompt": [*tokens, tokens[-1]],
            "max_tokens": 1,
            "temperature": 0,
            "cache_salt": warm_up.cache_salt,
            "kv_transfer_params": {"upbeat": said},
        }
        return body | {"priority": PRIORITY[1]} if self._watching.prioritises else body


def _now() -> float:
    return asyncio.get_running_loop().time()
