"""The one background thread that sends. Its callers only ever put hints into a queue and go on.

The thread starts with the first hint and ends when nothing came for a while, so that a client which nobody closes costs nothing. A forked
child has an empty queue, a thread of its own when it needs one, and never uses its parent's connection. When the
interpreter ends, what waits has `exit_timeout_s` to leave.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from upbeat.backoff import Backoff
from upbeat.forking import renew_in_children
from upbeat.hints import Advisory, Invalidation
from upbeat.outbox import Batch, Outbox
from upbeat.transport import Answer, Transport, Verdict

log = logging.getLogger("upbeat")
IDLE_S = 20.0


@dataclass(frozen=True)
class Counters:
    """What became of the hints so far.

    sent: the server has them. dropped: never sent (the queue was full, they came too late, or the client was closed).
    failed: the server refused them. invalid: arguments that are no hint. merged: a newer hint of the same session took their place.
    waiting: not yet sent.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    invalid: int = 0
    merged: int = 0
    waiting: int = 0


class Sender:
    """A queue and its thread. Every method may be called from any thread; none but `flush` and `close` waits, and none raises."""

    def __init__(
        self,
        connect: Callable[[], Transport],
        queue_limit: int,
        exit_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        idle_s: float = IDLE_S,
    ) -> None:
        self._connect, self._queue_limit, self._clock, self._idle_s = connect, queue_limit, clock, idle_s
        self.exit_timeout_s = exit_timeout_s
        self._invalid = 0
        self._said: set[str] = set()
        self.begin_anew()
        renew_in_children(self)
        _senders.add(self)

    def begin_anew(self) -> None:
        """Forget everything that is this process's. Called where there is no other thread: at first, and in a forked child."""
        # Reentrant: a signal handler or a finalizer that hints may interrupt this very thread while it hints.
        self._changed = threading.Condition(threading.RLock())
        self._outbox = Outbox(self._queue_limit)
        self._backoff = Backoff()
        self._transport: Transport | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._troubled = False

    def put(self, hint: Advisory | Invalidation) -> None:
        """Queue a hint and see that somebody sends it."""
        with self._changed:
            if self._closed:
                self._outbox.drop()
                return
            self._outbox.put(hint, self._clock())
            try:
                self._see_to_a_thread()
            except RuntimeError as e:  # no thread can be started any more: the interpreter is ending
                self._outbox.clear()
                self.say_once("thread", "hints are no longer sent: %s", e)
            self._changed.notify_all()

    def invalid(self, argument: str, why: object) -> None:
        """Somebody gave what is no hint. Counted, and logged the first time for each argument."""
        with self._changed:
            self._invalid += 1
        self.say_once(f"invalid {argument}", "a hint was not sent: %s (further ones are only counted)", why)

    def say_once(self, what: str, message: str, *args: object) -> None:
        """Log a warning, once in a process."""
        if what not in self._said:
            self._said.add(what)
            log.warning(message, *args)

    @property
    def counters(self) -> Counters:
        """What became of the hints so far."""
        with self._changed:
            box = self._outbox
            return Counters(box.sent, box.dropped, box.failed, self._invalid, box.merged, len(box))

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or is under way. False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self._outbox), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send what waits, unless the server is away, and end the thread. True when everything left in time. More than once is fine."""
        with self._changed:
            self._changed.wait_for(lambda: not len(self._outbox) or self._backoff.wait_s(self._clock()) > 0.0, timeout_s)
            done = not len(self._outbox)
            self._closed = True
            self._outbox.clear()
            self._changed.notify_all()
        return done

    def _see_to_a_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="upbeat-hints", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        transport: Transport | None = None
        while (batch := self._next()) is not None:
            try:
                transport = transport or self._connect()
                answer = _post(transport, batch, self._clock())
            except Exception as e:  # whatever it is, the host must not learn of it
                answer = Answer(Verdict.REFUSED, f"{type(e).__name__}: {e}"[:200])
            self._settle(answer)
        if transport is not None:
            transport.close()

    def _next(self) -> Batch | None:
        """What to send now, waiting for it; None when there is nothing more to do."""
        idle_until_s = self._clock() + self._idle_s
        with self._changed:
            while True:
                now = self._clock()
                pause_s = self._backoff.wait_s(now)
                batch = [] if pause_s > 0.0 else self._outbox.take(now)
                if batch:
                    return batch
                self._changed.notify_all()
                if self._closed or (not len(self._outbox) and now >= idle_until_s):
                    self._thread = None
                    return None
                self._changed.wait(pause_s if len(self._outbox) else max(0.0, idle_until_s - now))

    def _settle(self, answer: Answer) -> None:
        # Logged before anybody who waits is told, and without the lock: a log handler may do anything. Only this thread has `_troubled`.
        troubled = answer.verdict is not Verdict.ARRIVED
        if troubled and not self._troubled:
            log.warning("hints do not get through: %s", answer.detail)
        elif self._troubled and not troubled:
            log.info("hints get through again")
        self._troubled = troubled
        with self._changed:
            if answer.verdict is Verdict.ARRIVED:
                self._outbox.arrived()
            elif answer.verdict is Verdict.LATER:
                self._outbox.give_back()
            elif answer.verdict is Verdict.REFUSED:
                self._outbox.found_wrong()
            else:
                self._outbox.refused()
            if answer.verdict in (Verdict.LATER, Verdict.UNWELCOME):
                self._backoff.failed(self._clock(), random.random(), answer.retry_after_s)
            elif answer.verdict is Verdict.ARRIVED:
                self._backoff.worked()
            if self._closed:
                self._outbox.clear()
            self._changed.notify_all()


def _post(transport: Transport, batch: Batch, now_s: float) -> Answer:
    first = batch[0].hint
    if isinstance(first, Invalidation):
        return transport.post("/v1/invalidate", first.body())
    bodies = [item.hint.body(now_s - item.since_s) for item in batch if isinstance(item.hint, Advisory)]
    return transport.post("/v1/advisory", bodies[0] if len(bodies) == 1 else {"advisories": bodies})


_senders: weakref.WeakSet[Sender] = weakref.WeakSet()


def _at_exit() -> None:
    until_s = time.monotonic() + max((sender.exit_timeout_s for sender in list(_senders)), default=0.0)
    for sender in list(_senders):
        sender.close(min(sender.exit_timeout_s, max(0.0, until_s - time.monotonic())))


atexit.register(_at_exit)
