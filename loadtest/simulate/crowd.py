"""Millions of sessions on thousands of nodes: the scheduler's core, with nodes reduced to totals.

A node has outstanding work in seconds, and does one second of it a second; its caches are those in the session
directory. The scheduler knows no more of a real node. Initially each session's cache is on some node; each session has
one turn, most with a hint. Measures the core's processor time by kind of call.
"""

from __future__ import annotations

import heapq
import random
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contracts.ids import SessionKey
from loadtest.simulate.costs import NodeKind
from loadtest.simulate.users import HINT_TTL_S
from loadtest.typist import typing_times
from scheduler.core.advisories import Hint
from scheduler.core.control import Ask, Control, Prefetch, Settings
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport, Model, Rates

_TICK_EVERY_S = 0.5
_HISTORY_TOKENS, _NEW_TOKENS, _ANSWER_TOKENS = 4000, 113, 270


@dataclass(slots=True)
class _Node:
    """here: requests (end, id, session, tokens) by end. busy_until_s: end of all its work. number: of its last report.
    told: sessions to report (session, tokens)."""

    name: str
    busy_until_s: float = 0.0
    number: int = 0
    here: deque[tuple[float, str, SessionKey, int]] = field(default_factory=deque)
    told: list[tuple[SessionKey, int]] = field(default_factory=list)


class Crowd:
    """See the module. turns_per_s: of all sessions. missed: share of turns without a hint. Deterministic for a seed,
    except `spent_s`: processor seconds of the core by kind of call."""

    def __init__(
        self, kind: NodeKind, nodes: int, sessions: int, turns_per_s: float, seed: int = 1, missed: float = 0.1
    ) -> None:
        self.kind, self.sessions, self._rate, self._missed = kind, sessions, turns_per_s, missed
        self._draw = random.Random(seed)
        self.control = Control(Settings(models=(kind.model,), hints_per_s=2 * turns_per_s, hint_burst=10 * turns_per_s))
        self.nodes = {f"node-{n}": _Node(f"node-{n}") for n in range(nodes)}
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.waits_s: list[float] = []
        self.found: Counter[str] = Counter()
        self._prefetched: dict[SessionKey, str] = {}
        self._step_s, slope_s = kind.costs.decode(8, 8.0 * _HISTORY_TOKENS)
        self._marginal_s = slope_s * _HISTORY_TOKENS
        model, rates = (
            Model(kind.model, kind.shape, kind.max_tokens, 0),
            Rates(kind.link_bytes_per_s, kind.ssd_bytes_per_s, kind.blob_bytes_per_s),
        )
        for name in self.nodes:
            self.control.fleet.worker_joined(name, f"{name}:1", (model,), 0.0, rates)
            self.control.fleet.store_joined(name, f"{name}:2")

    def _timed(self, what: str, began: float) -> None:
        self.spent_s[what] += time.process_time() - began
        self.calls[what] += 1

    def key(self, number: int) -> SessionKey:
        """The session of this number."""
        return SessionKey("t", f"s{number}")

    def join(self) -> None:
        """Report each session's cache on a random node."""
        names, shape = list(self.nodes), self.kind.shape
        for number in range(self.sessions):
            tokens = self._tokens(number)
            held = Held(tokens, tokens * shape.token_bytes, tokens)
            began = time.process_time()
            self.control.directory.report(
                self._draw.choice(names), self.key(number), self.kind.model, tokens, 0.0, held, joining=True
            )
            self._timed("joining", began)

    def _tokens(self, number: int) -> int:
        """A session's history: uniform between a quarter and seven quarters of the mean."""
        return int(_HISTORY_TOKENS * (0.25 + 1.5 * ((number * 2_654_435_761) % 4096) / 4096)) // 64 * 64

    def run(self) -> dict[str, Any]:
        """Run one turn of every session. Returns the figures."""
        order = list(range(self.sessions))
        self._draw.shuffle(order)
        typing = typing_times(self.sessions, self._draw.getrandbits(32))
        due: list[tuple[float, int, str, int]] = []
        for at, number in enumerate(order):
            request_s = 20.0 + at / self._rate
            if self._draw.random() >= self._missed:
                due.append((max(request_s - typing[at], 0.0), at, "hint", number))
            due.append((request_s, self.sessions + at, "turn", number))
        heapq.heapify(due)
        every_s = self.control.fleet.report_every_s
        for n, name in enumerate(self.nodes):
            heapq.heappush(due, (every_s * n / len(self.nodes), -n - 1, "report", n))
            self._report(self.nodes[name], 0.0)
        heapq.heappush(due, (0.0, -len(self.nodes) - 2, "tick", 0))
        names, loads, turns = list(self.nodes), [], 0
        now = 0.0
        while turns < self.sessions:
            now, order_, what, number = heapq.heappop(due)
            if what == "turn":
                self._turn(number, turns, now)
                turns += 1
            elif what == "hint":
                self._hint(number, now)
            elif what == "report":
                self._report(self.nodes[names[number]], now)
                heapq.heappush(due, (now + every_s, order_, what, number))
            else:
                self._tick(now)
                loads.append([max(n.busy_until_s - now, 0.0) for n in self.nodes.values()])
                heapq.heappush(due, (now + _TICK_EVERY_S, order_, what, number))
        self.control.validate()
        return self._figures(now, np.asarray(loads))

    def _hint(self, number: int, now: float) -> None:
        hint = Hint(self.key(number), f"h{number}", expires_s=now + HINT_TTL_S, address=f"a{number % 10_000}")
        began = time.process_time()
        commands = self.control.advise(hint, now)
        self._timed("hints", began)
        self._carry_out(commands)

    def _carry_out(self, commands: list[Any]) -> None:
        for command in commands:
            if isinstance(command, Prefetch):
                self._prefetched[command.hint.session] = command.node
            else:
                self._prefetched.pop(command.session, None)

    def _turn(self, number: int, turn: int, now: float) -> None:
        session, tokens = self.key(number), self._tokens(number)
        began = time.process_time()
        placement = self.control.place(Ask(f"r{turn}", session, self.kind.model), now)
        self._timed("placements", began)
        node = self.nodes[placement.node]
        known = self.control.directory.get(session)
        at_home = known is not None and placement.node in known.holders
        prefetched = self._prefetched.pop(session, "") == placement.node
        self.found["at home" if at_home else "prefetched" if prefetched else "loaded"] += 1
        work_s = self.kind.costs.prefill_s(_NEW_TOKENS, tokens) + _ANSWER_TOKENS * self._marginal_s
        wait_s = max(node.busy_until_s - now, 0.0)
        load_s = 0.0 if at_home or prefetched else tokens * self.kind.shape.token_bytes / self.kind.link_bytes_per_s
        self.waits_s.append(max(wait_s, load_s))
        node.busy_until_s = now + wait_s + work_s
        end_s = node.busy_until_s + _ANSWER_TOKENS * self._step_s
        node.here.append((end_s, f"r{turn}", session, tokens + _NEW_TOKENS + _ANSWER_TOKENS))

    def _report(self, node: _Node, now: float) -> None:
        ended = []
        while node.here and node.here[0][0] <= now:
            _, request_id, session, tokens = node.here.popleft()
            ended.append(request_id)
            node.told.append((session, tokens))
        node.number += 1
        work_s = max(node.busy_until_s - now, 0.0)
        request_s = self.kind.costs.prefill_s(_NEW_TOKENS, _HISTORY_TOKENS) + _ANSWER_TOKENS * self._marginal_s
        pages = int(self.kind.hbm_bytes // self.kind.shape.piece_bytes)
        used = len(node.here) * (_HISTORY_TOKENS // self.kind.shape.chunk_tokens) * self.kind.shape.layers
        load = LoadReport(
            running=len(node.here), outstanding_s=work_s, request_s=request_s, hbm_pages_total=pages,
            hbm_pages_free=max(pages - used, 0),
            prefill_token_s=self.kind.costs.prefill_s(512, 0) / 512, by_priority={0: work_s},
        )  # fmt: skip
        here = [request_id for _, request_id, _, _ in node.here]
        began = time.process_time()
        self.control.fleet.loaded(node.name, load, here, ended, now, node.number)
        for session, tokens in node.told:
            held = Held(tokens, tokens * self.kind.shape.token_bytes, tokens)
            self.control.directory.report(node.name, session, self.kind.model, tokens, now, held)
        self._timed("reports", began)
        node.told.clear()

    def _tick(self, now: float) -> None:
        began = time.process_time()
        commands = self.control.tick(now)
        self._timed("ticks", began)
        self._carry_out(commands)

    def _figures(self, now: float, loads: np.ndarray[Any, Any]) -> dict[str, Any]:
        later = loads[len(loads) // 4 :]
        core_s = sum(seconds for what, seconds in self.spent_s.items() if what != "joining")
        return {
            "virtual_s": round(now, 3),
            "turns": len(self.waits_s),
            "turns_per_s": self._rate,
            "report_every_s": self.control.fleet.report_every_s,
            "wait_mean_s": round(float(np.mean(self.waits_s)), 6),
            "wait_p99_s": round(float(np.percentile(self.waits_s, 99)), 6),
            "caches": dict(self.found),
            "hints": dict(self.control.hints) | dict(self.control.advisories.outcomes),
            "work_peak_over_mean": round(float(later.max(axis=1).mean() / max(later.mean(), 1e-9)), 4),
            "core_s": {what: round(seconds, 3) for what, seconds in self.spent_s.items()},
            "core_us_a_call": {what: round(1e6 * self.spent_s[what] / self.calls[what], 2) for what in self.spent_s},
            "core_share_of_one_processor_core": round(core_s / now, 4),
        }
