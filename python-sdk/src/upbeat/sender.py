"""The background thread that sends queued hints. Callers only put hints into the queue.

The thread starts with the first hint and ends after IDLE_S without one, so an unclosed client costs nothing. A forked
child has an empty queue, its own thread and its own connection. At interpreter exit, waiting hints have
`exit_timeout_s` to be sent.
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
    """Numbers of hints by outcome.

    sent: accepted by the server. dropped: never sent (queue full, expired, or client closed). failed: refused by the
    server. invalid: arguments that are no hint. merged: replaced by a newer hint of the same session. waiting: not yet
    sent.
    """

    sent: int = 0
    dropped: int = 0
    failed: int = 0
    invalid: int = 0
    merged: int = 0
    waiting: int = 0


class Sender:
    """A queue and its thread. All methods are thread-safe and never raise; only `flush` and `close` wait."""

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
        """Reset all per-process state. Called while there is no other thread: at construction and in a forked child."""
        # Reentrant: a signal handler or a finalizer may give a hint while this thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._outbox = Outbox(self._queue_limit)
        self._backoff = Backoff()
        self._transport: Transport | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._troubled = False

    def put(self, hint: Advisory | Invalidation) -> None:
        """Queue a hint and start the thread if it is not running. Dropped after `close`."""
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
        """Count an argument that is no hint; log the first one of each `argument`."""
        with self._changed:
            self._invalid += 1
        self.say_once(f"invalid {argument}", "a hint was not sent: %s (further ones are only counted)", why)

    def say_once(self, what: str, message: str, *args: object) -> None:
        """Log a warning, once for each key `what`."""
        if what not in self._said:
            self._said.add(what)
            log.warning(message, *args)

    @property
    def counters(self) -> Counters:
        """Numbers of hints by outcome, so far."""
        with self._changed:
            box = self._outbox
            return Counters(box.sent, box.dropped, box.failed, self._invalid, box.merged, len(box))

    def flush(self, timeout_s: float) -> bool:
        """Wait until no hint is waiting or in flight. False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not len(self._outbox), timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Send waiting hints, unless the server is away, and end the thread. True if all were sent. Idempotent."""
        with self._changed:
            self._changed.wait_for(
                lambda: not len(self._outbox) or self._backoff.wait_s(self._clock()) > 0.0, timeout_s
            )
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
            except Exception as e:  # no error may reach the host program
                answer = Answer(Verdict.REFUSED, f"{type(e).__name__}: {e}"[:200])
            self._settle(answer)
        if transport is not None:
            transport.close()

    def _next(self) -> Batch | None:
        """Wait for the next batch. None when closed or idle: the thread ends."""
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
        # Logged before waiters are notified, and without the lock: a log handler may do anything. Only this thread uses
        # `_troubled`.
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
