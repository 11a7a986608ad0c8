"""Which request is to blame when an engine dies, which ones go on at once, and what is refused for a while.

A worker says whose trial it is before its engine computes for that request alone (`worker.core.trials`). So when a stream is lost:

- during a trial, the request on trial is to blame. It is refused, and so is the same request of that tenant for `REFUSED_S`. All others
  on the worker are innocent and go on elsewhere, uncounted.
- else whatever the worker had been sent may be to blame, whether it was accepted or not: tokenising can kill too. Each goes on
  elsewhere, on trial; at the third time (`core.retry`) it is refused all the same.
- after an orderly end (the worker has said that it leaves), nobody is to blame.

An engine that stands still during a trial is as good as dead. A worker of which nothing is heard may have been stopped, or be starved
by others: its requests go elsewhere on trial, and none is refused for that.

What is remembered is a digest of tenant, model, prompt and sampling. A tenant has a bounded memory of its own, so that nobody can make it
forget another's, or be refused by another's.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from blake3 import blake3

from contracts import frames
from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest

#: For how long a poisonous request is refused, in seconds.
REFUSED_S = 300.0
#: Digests of a tenant, and tenants of which any are kept; the oldest go first.
MOST_OF_A_TENANT, MOST_TENANTS = 256, 1024


class Verdict(Enum):
    """What becomes of a request whose worker was lost."""

    INNOCENT = "innocent"
    SUSPECT = "suspect"
    GUILTY = "guilty"


def judge(sent: dict[str, bool], trial: str, *, leaving: bool = False, silent: bool = False) -> dict[str, Verdict]:
    """The verdict on each request of a worker that was lost, by id. sent: whether the worker had all of it. trial: whose it was as the
    worker last said, of whichever gateway; empty: nobody's. leaving: it had said that it ends. silent: it may live, and nothing is heard
    of it, which need not be its engine's fault."""
    if leaving:
        return dict.fromkeys(sent, Verdict.INNOCENT)
    if trial and not silent:
        return {request_id: Verdict.GUILTY if request_id == trial else Verdict.INNOCENT for request_id in sent}
    return {request_id: Verdict.SUSPECT if whole else Verdict.INNOCENT for request_id, whole in sent.items()}


def digest(request: GenerateRequest) -> bytes:
    """What the same request has too when it is sent again: its seed, its session and how it is placed do not matter. Raises InvalidRequest
    for a request that cannot be encoded."""
    same = GenerateRequest(
        "", request.tenant, "", request.model, replace(request.sampling, seed=None), request.messages, request.prompt, request.prompt_tokens
    )
    same.json_schema, same.tool_use, same.packed = request.json_schema, request.tool_use, request.packed
    same.template_kwargs, same.regex = request.template_kwargs, request.regex
    return blake3(frames.encode_request(same)).digest()


class Quarantine:
    """What is refused. Invariant: at most `MOST_TENANTS` tenants with 1 to `MOST_OF_A_TENANT` digests each, oldest first."""

    def __init__(self) -> None:
        self._until_s: dict[str, dict[bytes, float]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._until_s.values()))

    def condemn(self, request: GenerateRequest, now: float) -> InvalidRequest:
        """Remember a request that is to blame. Returns what its caller is told."""
        known = self._until_s.pop(request.tenant, {})
        self._until_s[request.tenant] = known
        key = digest(request)
        known.pop(key, None)
        known[key] = now + REFUSED_S
        if len(known) > MOST_OF_A_TENANT:
            del known[next(iter(known))]
        if len(self._until_s) > MOST_TENANTS:
            del self._until_s[next(iter(self._until_s))]
        return _refusal()

    def remembers(self, tenant: str) -> bool:
        """Something of this tenant is refused, or was a while ago."""
        return tenant in self._until_s

    def check(self, request: GenerateRequest, now: float) -> None:
        """Raises InvalidRequest for a request that is refused. Costs next to nothing for tenants of whom nothing is remembered."""
        known = self._until_s.get(request.tenant)
        if known is None:
            return
        while known and next(iter(known.values())) <= now:
            del known[next(iter(known))]
        if not known:
            del self._until_s[request.tenant]
        elif digest(request) in known:
            raise _refusal()

    def validate(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        assert len(self._until_s) <= MOST_TENANTS
        for known in self._until_s.values():
            assert 1 <= len(known) <= MOST_OF_A_TENANT and list(known.values()) == sorted(known.values())


def _refusal() -> InvalidRequest:
    message = "this request was on an engine more than once when that died; it is refused for some minutes. Change it, or report it"
    return InvalidRequest(message, code="poisonous_request")
