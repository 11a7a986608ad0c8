"""The `gateway` section of the configuration: addresses, keys and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from contracts.api_keys import check_configured
from contracts.ranges import WEIGHT

STRICT = ConfigDict(extra="forbid", validate_default=True)
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Priority = Annotated[int, Field(ge=-1000, le=1000)]
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]{2,45}\]")
#: A configured origin of web pages; `*`: any.
ORIGIN = re.compile(r"\*|https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class ApiKey(BaseModel):
    """A caller's key: in full, or `sha256:...` as `upbeat keys new` prints it. max_priority: the most urgent (lowest)
    priority that it may request; default: its tenant's."""

    model_config = STRICT
    key: str = Field(min_length=8)
    tenant: Tenant = "default"
    max_priority: _Priority | None = None

    @field_validator("key")
    @classmethod
    def _whole(cls, value: str) -> str:
        if value.startswith("ek_"):
            raise ValueError("a key that begins with ek_ would be taken for a browser token; choose another one")
        return check_configured(value)


class TenantLimits(BaseModel):
    """Limits of a tenant's requests for text (hints have a separate limit). 0: no limit; left out: `gateway.limits`."""

    model_config = STRICT
    requests_per_min: _Amount | None = None
    #: Prompt and answer together.
    tokens_per_min: _Amount | None = None
    #: Concurrent requests.
    concurrent: _Count | None = None
    #: Per day and month in UTC. Counted in memory, so a restarted gateway begins at 0.
    tokens_per_day: _Count | None = None
    tokens_per_month: _Count | None = None
    #: Share of scarce resources (slots here, rows on a node) among tenants at the same priority: twice the weight,
    #: twice the share. Default 1.
    weight: Annotated[float, Field(ge=WEIGHT[0], le=WEIGHT[1], allow_inf_nan=False)] | None = None
    #: The most urgent (lowest) priority that its keys may request. Default 0.
    max_priority: _Priority | None = None
    #: Whose requests share cached prefixes: all of the tenant (default), or those of one user, as requests name it.
    cache_scope: Literal["tenant", "user"] | None = None


class GatewaySection(BaseModel):
    """The HTTP gateway."""

    model_config = STRICT
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=1, le=65535)
    #: Directory with tls.crt and tls.key for HTTPS, as in a Kubernetes TLS secret; None: plain HTTP.
    https: Path | None = None
    #: Accepted Host headers, without a port, such as chat.example.org, *.example.org, 10.0.0.7 or [fd00::7]. Loopback
    #: names and `host` are always accepted. With keys and an empty list, every name is accepted; without keys, no
    #: other.
    hosts: list[str] = []
    #: Processes that share the port (SO_REUSEPORT). Each has an equal share of every limit below that is not per
    #: request.
    processes: int = Field(default=1, ge=1, le=64)
    api_keys: list[ApiKey] = []
    #: Default limits of a tenant, and limits by tenant.
    limits: TenantLimits = TenantLimits()
    tenant_limits: dict[Tenant, TenantLimits] = {}
    #: Signs browser tokens; must be equal on all gateways. Empty: derived from the hashes of the API keys. Changing it
    #: invalidates all tokens.
    token_secret: str = Field(default="", pattern=r"^(.{32,})?$")
    #: Hints per second of one tenant.
    max_advisories_per_s: float = Field(default=1000.0, gt=0)
    #: Queries per second of one tenant: requests about sessions, stored responses, files, jobs, models and the fleet.
    #: Five seconds' worth may come at once.
    max_queries_per_s: float = Field(default=200.0, gt=0)
    #: Origins of web pages that may call all of /v1, such as https://chat.example.org; "*": any. Hints are accepted
    #: from every page.
    cors_origins: list[str] = []
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    #: Bytes of request bodies held at a time, over all requests; requests beyond that get 503.
    body_memory_bytes: int = Field(default=256 << 20, ge=1 << 20)
    #: The share of the gateway's bodies, requests and connections that one tenant, or one address, may use.
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    #: Helper processes per gateway process that parse large bodies; one tenant uses at most all but one.
    decoders: int = Field(default=2, ge=1, le=64)
    #: Concurrent requests for text; further ones wait up to `queue_s` seconds, then get 503.
    max_requests: int = Field(default=4096, ge=1)
    queue_s: float = Field(default=2.0, ge=0, le=60)
    #: Concurrent connections; further ones get 503 and are closed.
    max_connections: int = Field(default=10_000, ge=8)
    #: Seconds for a request's headers to arrive, from its first byte or from the opening of the connection.
    header_s: float = Field(default=20.0, ge=0.5, allow_inf_nan=False)
    #: A client that reads less than 32 KiB of its pending response in this time is disconnected, and its request
    #: cancelled; in seconds.
    write_s: float = Field(default=30.0, ge=0.5, allow_inf_nan=False)
    #: Seconds without a completed request until a connection is closed; longer than the idle timeout of load balancers
    #: (60 s).
    idle_s: float = Field(default=75.0, ge=1, allow_inf_nan=False)
    #: Seconds that a request waits for a worker to accept it (checked and tokenised), and from then on for its first
    #: token (queueing included), before it goes to another node. 0: no limit.
    accept_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    first_token_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    #: Seconds of silence after which a stream gets a comment (`: activating MODEL`, `: waiting`), so that proxies and
    #: users see that it lives. 0: none.
    comment_s: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    #: Seconds that a response of `/v1/responses` is stored after the last use of its conversation (default: 30 days).
    #: 0: nothing is stored. In `data`, for all processes of this machine.
    responses_keep_s: float = Field(default=30 * 86_400.0, ge=0, allow_inf_nan=False)
    #: Bytes of stored responses, over all tenants; one tenant may have `tenant_share` of it. Then the sessions leave
    #: that were used least recently.
    responses_bytes: int = Field(default=1 << 30, ge=1 << 20)
    #: Seconds for running requests to end when the gateway is stopped.
    drain_s: float = Field(default=25.0, ge=0, allow_inf_nan=False)

    @field_validator("https")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()

    @property
    def scheme(self) -> str:
        """Of its URLs."""
        return "http" if self.https is None else "https"

    def weight(self, tenant: str) -> float:
        """A tenant's weight, from `tenant_limits`, else from `limits`."""
        own = self.tenant_limits.get(tenant, self.limits).weight
        return own or self.limits.weight or 1.0

    def per_user(self, tenant: str) -> bool:
        """Whether a tenant's users share no KV."""
        own = self.tenant_limits.get(tenant, self.limits).cache_scope
        return (own or self.limits.cache_scope) == "user"

    def max_priority(self, key: ApiKey) -> int:
        """The most urgent priority that a key may request: the less urgent of its own limit and its tenant's."""
        own = self.tenant_limits.get(key.tenant)
        tenants = own.max_priority if own is not None and own.max_priority is not None else self.limits.max_priority
        return max((p for p in (key.max_priority, tenants) if p is not None), default=0)

    @field_validator("hosts")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for host in value:
            if not _HOST.fullmatch(host):
                raise ValueError(
                    f"{host!r} is no host; give a name or an address without a port, such as chat.example.org or "
                    "[fd00::7]"
                )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is no origin; give scheme, host and port, such as https://chat.example.org, or *"
                )
        return value
