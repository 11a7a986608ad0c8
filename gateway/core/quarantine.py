"""Decides which request an engine died of, which requests continue, and what is refused for a while.

A worker announces a trial before its engine computes that request alone (`worker.core.trials`). When a stream is lost:

- during a trial, the request on trial is guilty. It is refused, and so is the same request of that tenant for
  `REFUSED_S`. All others on the worker are innocent and continue elsewhere; the attempt does not count.
- otherwise every request that the worker had received is suspect, accepted or not, because tokenizing can kill too.
  Each continues elsewhere on trial; at the third loss (`core.retry`) it is refused.
- after an orderly end (the worker has said that it leaves), all are innocent.

An engine that hangs during a trial counts as dead. A silent worker may have been stopped or starved: its requests
continue elsewhere on trial, and none is refused for that.

An engine with HTTP of its own holds no trials. A request that was alone on it when it died is accused, and is guilty
when it is accused again within `REFUSED_S`, whether in another attempt or sent again by its caller.

The quarantine stores digests of tenant, model, prompt and sampling (`digest`, or of a whole body: `core.relay_bodies`),
in bounded memory per tenant, so that tenants cannot affect each other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from enum import Enum

from blake3 import blake3

from contracts import frames
from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest

#: How long a poisonous request is refused, in seconds.
REFUSED_S = 300.0
#: Digests per tenant, and tenants; the oldest are dropped first.
MOST_OF_A_TENANT, MOST_TENANTS = 256, 1024


class Verdict(Enum):
    """The verdict on a request whose worker was lost."""

    INNOCENT = "innocent"
    SUSPECT = "suspect"
    GUILTY = "guilty"


def judge(sent: dict[str, bool], trial: str, *, leaving: bool = False, silent: bool = False) -> dict[str, Verdict]:
    """The verdict on each request of a lost worker, by id. sent: whether the worker had the whole request. trial: id of
    the request on trial as last announced, perhaps another gateway's; empty: none. leaving: the worker had said that it
    ends. silent: nothing is heard of the worker, which need not be its engine's fault."""
    if leaving:
        return dict.fromkeys(sent, Verdict.INNOCENT)
    if trial and not silent:
        return {request_id: Verdict.GUILTY if request_id == trial else Verdict.INNOCENT for request_id in sent}
    return {request_id: Verdict.SUSPECT if whole else Verdict.INNOCENT for request_id, whole in sent.items()}


def digest(request: GenerateRequest) -> bytes:
    """A digest that repeats of the request share: without seed, session and placement. Raises InvalidRequest for a
    request that cannot be encoded."""
    same = GenerateRequest(
        "",
        request.tenant,
        "",
        request.model,
        replace(request.sampling, seed=None),
        request.messages,
        request.prompt,
        request.prompt_tokens,
    )
    same.json_schema, same.tool_use, same.packed = request.json_schema, request.tool_use, request.packed
    same.template_kwargs, same.regex = request.template_kwargs, request.regex
    same.adapter = request.adapter
    return blake3(frames.encode_request(same)).digest()


class _Digests:
    """Digests with the time until which they count. Invariant: at most `MOST_TENANTS` tenants with 1 to
    `MOST_OF_A_TENANT` digests each, oldest first."""

    def __init__(self) -> None:
        self._until_s: dict[str, dict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._until_s.values()))

    def __contains__(self, tenant: str) -> bool:
        """Whether the tenant has digests, perhaps expired ones."""
        return tenant in self._until_s

    def note(self, tenant: str, key: bytes, until_s: float) -> None:
        known = self._until_s.pop(tenant, {})
        self._until_s[tenant] = known
        known.pop(key, None)
        known[key] = until_s
        if len(known) > MOST_OF_A_TENANT:
            del known[next(iter(known))]
        if len(self._until_s) > MOST_TENANTS:
            del self._until_s[next(iter(self._until_s))]

    def of(self, tenant: str, now: float) -> Collection[bytes]:
        """The tenant's digests that still count."""
        known = self._until_s.get(tenant)
        if known is None:
            return ()
        while known and next(iter(known.values())) <= now:
            del known[next(iter(known))]
        if not known:
            del self._until_s[tenant]
        return known

    def validate(self) -> None:
        assert len(self._until_s) <= MOST_TENANTS
        for known in self._until_s.values():
            assert 1 <= len(known) <= MOST_OF_A_TENANT and list(known.values()) == sorted(known.values())


class Quarantine:
    """The refused requests, and those accused once."""

    def __init__(self) -> None:
        self._refused, self._accused = _Digests(), _Digests()

    def __len__(self) -> int:
        return len(self._refused)

    def condemn(self, request: GenerateRequest, now: float) -> InvalidRequest:
        """Refuse this request from now on. Returns the error for its caller."""
        self._refused.note(request.tenant, digest(request), now + REFUSED_S)
        return _refusal()

    def remembers(self, tenant: str) -> bool:
        """Whether the tenant has refused requests, perhaps expired ones."""
        return tenant in self._refused

    def check(self, request: GenerateRequest, now: float) -> None:
        """Raises InvalidRequest for a refused request. Almost free for tenants without digests."""
        known = self._refused.of(request.tenant, now)
        if known and digest(request) in known:
            raise _refusal()

    def accuse(self, tenant: str, key: bytes, now: float) -> InvalidRequest | None:
        """An engine died while it had only the request with this digest. Returns the error for its caller when this is
        the second time; the request is refused from then on."""
        if key not in self._accused.of(tenant, now):
            self._accused.note(tenant, key, now + REFUSED_S)
            return None
        self._refused.note(tenant, key, now + REFUSED_S)
        return _refusal()

    def check_digest(self, tenant: str, key: bytes, now: float) -> None:
        """Raises InvalidRequest for a refused request, by its digest."""
        if key in self._refused.of(tenant, now):
            raise _refusal()

    def validate(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self._refused.validate()
        self._accused.validate()


def _refusal() -> InvalidRequest:
    message = (
        "this request was on an engine more than once when that died; it is refused for some minutes. Change "
        "it, or report it"
    )
    return InvalidRequest(message, code="poisonous_request")
