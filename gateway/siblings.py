"""The other processes of this gateway (`gateway.processes`): each serves its metrics to the others, so that any of them
can answer `/metrics` for all.

They use sockets in Linux's abstract namespace. Like the shared port, these belong to the network namespace; they need
no folder and end with their process. Another user's process is neither answered nor asked (`runtime.same_machine`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from runtime import same_machine, telemetry
from runtime.telemetry import metrics_text

log = telemetry.logger("gateway")
ANSWER_TIMEOUT_S = 2.0
#: The pause after a page, as a multiple of the time that it took.
PAUSE_TIMES = 4.0
LABEL = "process"


class Siblings:
    """Process `number` of `count` at the gateway's `port`."""

    def __init__(self, port: int, number: int, count: int) -> None:
        self._port, self.number, self.count = port, number, count
        self._listening: asyncio.Server | None = None
        #: The page that whoever asks now will get; when the next one may be begun, on the loop's clock.
        self._next: asyncio.Task[bytes] | None = None
        self._rested_s = 0.0
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Serve this process's metrics to the others, if there are any. Raises OSError when another process has this
        number. If another user has taken its name, others miss this process's metrics, and no more."""
        if self.count == 1:
            return
        name = self._name(self.number)
        found = same_machine.listening(name)
        if found is not None:
            self._listening = await asyncio.start_unix_server(_tell, sock=found[0])
        elif (other := await asyncio.to_thread(same_machine.connected, name, ANSWER_TIMEOUT_S)) is not None:
            other.close()
            raise OSError(f"process {self.number} of the gateway at port {self._port} runs already")
        else:
            log.warning("another user has the socket for this process's metrics", socket=name)

    def close(self) -> None:
        """Stop serving them."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    async def metrics(self) -> bytes:
        """Prometheus' text of this process, or of all processes with a label for the process number. A process that
        does not answer is left out.

        Nobody needs a key for it, so however many ask, pages are made one at a time, off the loop, with pauses. Whoever
        asks meanwhile gets the next one.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._page())
        return await asyncio.shield(self._next)

    async def _page(self) -> bytes:
        loop = asyncio.get_running_loop()
        async with self._one_at_a_time:
            await asyncio.sleep(self._rested_s - loop.time())
            self._next = None
            began_s = loop.time()
            try:
                return await self._make()
            finally:
                self._rested_s = loop.time() + PAUSE_TIMES * (loop.time() - began_s)

    async def _make(self) -> bytes:
        if self.count == 1:
            return await asyncio.to_thread(metrics_text)
        others = [n for n in range(self.count) if n != self.number]
        texts = await asyncio.gather(asyncio.to_thread(metrics_text), *(self._ask(n) for n in others))
        found = {n: text.decode() for n, text in zip((self.number, *others), texts, strict=True) if text}
        return await asyncio.to_thread(merged, {str(n): found[n] for n in sorted(found)})

    async def _ask(self, number: int) -> bytes:
        asking = await asyncio.to_thread(same_machine.connected, self._name(number), ANSWER_TIMEOUT_S)
        if asking is None:
            return b""
        loop, text = asyncio.get_running_loop(), bytearray()
        with asking, contextlib.suppress(OSError, TimeoutError):
            asking.setblocking(False)
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while piece := await loop.sock_recv(asking, 1 << 16):
                    text += piece
                return bytes(text)
        return b""

    def _name(self, number: int) -> str:
        return f"upbeat-gateway-{os.getuid()}-{self._port}-{number}"


async def _tell(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        # uvloop's socket cannot say who is at its other side.
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
            own = same_machine.is_own(connection)
        if own:
            writer.write(await asyncio.to_thread(metrics_text))
            await writer.drain()
    writer.close()


def merged(texts: Mapping[str, str]) -> bytes:
    """Several processes' metrics in one text, each sample labelled with its process's name."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            known.samples += [s._replace(labels={**s.labels, LABEL: name}) for s in family.samples]

    class _All(Collector):
        def collect(self) -> Iterable[Metric]:
            return families.values()

    registry = CollectorRegistry()
    registry.register(_All())
    return generate_latest(registry)
