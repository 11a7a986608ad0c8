"""Limits tenants' requests for text: requests and tokens a minute, concurrent requests, tokens a day and a month.

`begin` admits a request against all limits or none, with an estimate of its prompt's tokens; `finish` replaces the
estimate with the tokens used by prompt and answer. An answer may leave a debt that later requests wait for, so the rate
is exceeded at most by concurrent requests. Failed requests count as requests, not as tokens.

The state is in this process's memory, so days and months start again with the process
(docs/design/0018-limits-at-the-gateway.md). For billing use the counters of `/metrics` or the logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from contracts.errors import IllegalTransition
from gateway.core.limits import Bucket

MINUTE_S = 60.0
#: Bytes of text per token, roughly, in common languages and tokenizers.
BYTES_A_TOKEN = 4
What = Literal["requests", "tokens", "concurrent", "day", "month"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """One tenant's limits; 0: none."""

    requests_per_min: float = 0.0
    tokens_per_min: float = 0.0
    concurrent: int = 0
    tokens_per_day: int = 0
    tokens_per_month: int = 0

    def share(self, processes: int) -> Allowance:
        """The limits of each of `processes` processes, so that all together keep to these; at least one request at a
        time."""
        return Allowance(
            self.requests_per_min / processes,
            self.tokens_per_min / processes,
            -(-self.concurrent // processes),
            -(-self.tokens_per_day // processes),
            -(-self.tokens_per_month // processes),
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """An admitted request. tokens: its estimate."""

    number: int
    tenant: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A refusal. what: which limit; limit: its value; after_s: when a retry can succeed."""

    what: What
    limit: float
    after_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """State of a limit per minute: `limit` and `remaining` in requests or tokens, `full_s` seconds until the limit is
    full again."""

    limit: int
    remaining: int
    full_s: float


class _Window:
    """Tokens used in the current day or month. ends_s: in seconds since the epoch."""

    __slots__ = ("ends_s", "kind", "used")

    def __init__(self, kind: Literal["day", "month"]) -> None:
        self.kind, self.used, self.ends_s = kind, 0, 0.0

    def at(self, wall_s: float) -> None:
        """Start a new window when the last one has ended. A clock that went back stays in its window."""
        if wall_s >= self.ends_s:
            self.used, self.ends_s = 0, _end(self.kind, wall_s)


def _end(kind: Literal["day", "month"], wall_s: float) -> float:
    day = datetime.fromtimestamp(wall_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if kind == "day":
        return (day + timedelta(days=1)).timestamp()
    return (day.replace(day=1) + timedelta(days=32)).replace(day=1).timestamp()


class _Tenant:
    """One tenant's use. Invariants: `running` is the number of its tickets, `estimated` the sum of their tokens."""

    def __init__(self, allowed: Allowance, now_s: float) -> None:
        self.allowed = allowed
        self.requests = _bucket(allowed.requests_per_min, now_s)
        self.tokens = _bucket(allowed.tokens_per_min, now_s)
        limits: list[tuple[Literal["day", "month"], int]] = [
            ("day", allowed.tokens_per_day),
            ("month", allowed.tokens_per_month),
        ]
        #: Only windows with a limit.
        self.windows = [(_Window(kind), limit) for kind, limit in limits if limit]
        self.running = 0
        self.estimated = 0

    def refusal(self, tokens: int, now_s: float, wall_s: float) -> Refused | None:
        for window, limit in reversed(self.windows):
            window.at(wall_s)
            if window.used + self.estimated + tokens > limit:
                return Refused(window.kind, limit, window.ends_s - wall_s)
        if self.allowed.concurrent and self.running >= self.allowed.concurrent:
            return Refused("concurrent", self.allowed.concurrent, 1.0)
        requests_s = self.requests.wait_s(1.0, now_s) if self.requests is not None else 0.0
        tokens_s = self.tokens.wait_s(tokens, now_s) if self.tokens is not None else 0.0
        if requests_s and requests_s >= tokens_s:
            return Refused("requests", self.allowed.requests_per_min, requests_s)
        return Refused("tokens", self.allowed.tokens_per_min, tokens_s) if tokens_s else None


def _bucket(per_min: float, now_s: float) -> Bucket | None:
    # With a limit below one a minute, the bucket still fills up to one.
    return Bucket(per_min / MINUTE_S, max(1.0, per_min), now_s) if per_min else None


class Usage:
    """All tenants' use. Every `begin` needs one `finish` or `withdraw`; otherwise its ticket stays open for ever."""

    def __init__(self, default: Allowance, tenants: dict[str, Allowance]) -> None:
        self._default, self._named = default, dict(tenants)
        self._tenants: dict[str, _Tenant] = {}
        self._open: dict[int, Ticket] = {}
        self._count = 0

    def begin(self, tenant: str, tokens: int, now_s: float, wall_s: float) -> Ticket | Refused:
        """Admit a request whose prompt has about `tokens`, or return the limit that refuses it, taking nothing."""
        state = self._of(tenant, now_s)
        refused = state.refusal(tokens, now_s, wall_s)
        if refused is not None:
            return refused
        if state.requests is not None:
            state.requests.take(1)
        if state.tokens is not None:
            state.tokens.take(tokens)
        state.running += 1
        state.estimated += tokens
        self._count += 1
        ticket = self._open[self._count] = Ticket(self._count, tenant, tokens)
        return ticket

    def finish(self, ticket: Ticket, used_tokens: int, now_s: float, wall_s: float) -> None:
        """The request has ended and used `used_tokens`, prompt and answers; 0 when it failed. Raises IllegalTransition
        for a finished ticket."""
        if self._open.pop(ticket.number, None) is None:
            raise IllegalTransition(f"request {ticket.number} of {ticket.tenant} was finished twice")
        state = self._tenants[ticket.tenant]
        state.running -= 1
        state.estimated -= ticket.tokens
        if state.tokens is not None:
            state.tokens.refill(now_s)
            state.tokens.take(used_tokens - ticket.tokens)
        for window, _ in state.windows:
            window.at(wall_s)
            window.used += used_tokens

    def withdraw(self, ticket: Ticket, now_s: float, wall_s: float) -> None:
        """The request never began: undo `begin`. Raises IllegalTransition for a finished ticket."""
        self.finish(ticket, 0, now_s, wall_s)
        requests = self._tenants[ticket.tenant].requests
        if requests is not None:
            requests.take(-1)

    def standing(self, tenant: str, now_s: float) -> dict[str, Standing]:
        """The tenant's limits per minute, by `requests` and `tokens`, as far as it has them."""
        state = self._of(tenant, now_s)
        found = {}
        for what, bucket in (("requests", state.requests), ("tokens", state.tokens)):
            if bucket is not None:
                bucket.refill(now_s)
                found[what] = Standing(int(bucket.burst), max(0, int(bucket.level)), bucket.full_in_s(now_s))
        return found

    def validate(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        for name, state in self._tenants.items():
            mine = [t for t in self._open.values() if t.tenant == name]
            assert state.running == len(mine) and state.estimated == sum(t.tokens for t in mine)
            assert not state.allowed.concurrent or state.running <= state.allowed.concurrent
            for bucket in (state.requests, state.tokens):
                if bucket is not None:
                    bucket.validate()
            assert all(window.used >= 0 for window, _ in state.windows)

    def _of(self, tenant: str, now_s: float) -> _Tenant:
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant(self._named.get(tenant, self._default), now_s)
        return state


def estimated_tokens(text_bytes: int, token_ids: int = 0) -> int:
    """Estimated tokens of a prompt with these bytes of text and token ids; at least 1."""
    return max(1, -(-text_bytes // BYTES_A_TOKEN) + token_ids)


def duration(seconds: float) -> str:
    """The format of `x-ratelimit-reset-*`: `17ms`, `1.5s`, `6m0s`, `2h3m0s`."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    if seconds < MINUTE_S:
        return f"{round(seconds, 1):g}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
