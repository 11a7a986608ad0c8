"""The `gateway` section of the configuration: where it listens, who may call, and how much of everything it takes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from contracts.api_keys import check_configured
from contracts.ranges import WEIGHT

STRICT = ConfigDict(extra="forbid", validate_default=True)
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]
_Priority = Annotated[int, Field(ge=-1000, le=1000)]
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*|\[[0-9A-Fa-f:.]{2,45}\]")
#: An origin of web pages as it is configured, or any.
ORIGIN = re.compile(r"\*|https?://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


class ApiKey(BaseModel):
    """One caller's key: in full, or `sha256:...` as `upbeat keys new` prints it. `max_priority` is the most urgent (lowest) priority it
    may ask for; left out: its tenant's."""

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
    """What one tenant may use: of text, hints have their own limit. 0: no limit; left out: what `gateway.limits` says, if anything."""

    model_config = STRICT
    requests_per_min: _Amount | None = None
    #: Prompt and answer together.
    tokens_per_min: _Amount | None = None
    #: Requests at a time.
    concurrent: _Count | None = None
    #: Of a day and of a month in UTC. Counted in memory: a gateway that starts again begins at nothing.
    tokens_per_day: _Count | None = None
    tokens_per_month: _Count | None = None
    #: How much it gets of what is scarce (slots here, rows on a node) beside others who want it at the same priority: twice the weight,
    #: twice as much. 1 where nothing is said.
    weight: Annotated[float, Field(ge=WEIGHT[0], le=WEIGHT[1], allow_inf_nan=False)] | None = None
    #: The most urgent (lowest) priority that its keys may ask for. Nobody says: 0.
    max_priority: _Priority | None = None


class GatewaySection(BaseModel):
    """The front door."""

    model_config = STRICT
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=1, le=65535)
    #: More names under which clients may call it (the Host header), without a port, such as chat.example.org, *.example.org, 10.0.0.7 or
    #: [fd00::7]. Loopback's names and `host` are always there. Without keys no other is served; with keys, none listed: every name is.
    hosts: list[str] = []
    #: Processes that share the port (SO_REUSEPORT). Each has its share of every limit below that is not a request's own.
    processes: int = Field(default=1, ge=1, le=64)
    api_keys: list[ApiKey] = []
    #: Every tenant's limits, and those of some tenants.
    limits: TenantLimits = TenantLimits()
    tenant_limits: dict[Tenant, TenantLimits] = {}
    #: What signs browser tokens, the same on all gateways; empty: the hashes of the API keys do. Changing it ends all tokens.
    token_secret: str = Field(default="", pattern=r"^(.{32,})?$")
    #: Hints a tenant may send, a second.
    max_advisories_per_s: float = Field(default=1000.0, gt=0)
    #: Origins of web pages that may call all of /v1, such as https://chat.example.org; "*": any. Hints may come from every page anyway.
    cors_origins: list[str] = []
    max_body_bytes: int = Field(default=16 << 20, ge=1024)
    #: Bytes of request bodies that are held at a time, over all requests; what comes beyond that is answered with 503.
    body_memory_bytes: int = Field(default=256 << 20, ge=1 << 20)
    #: The part of what the gateway holds at a time (bodies, requests, connections) that one tenant, or one address, may take.
    tenant_share: float = Field(default=0.5, gt=0, le=1)
    #: Helper processes, of each gateway process, that read large bodies; one tenant has at most all but one of them.
    decoders: int = Field(default=2, ge=1, le=64)
    #: Requests for text at a time; one more waits for `queue_s` seconds at most and is then answered with 503.
    max_requests: int = Field(default=4096, ge=1)
    queue_s: float = Field(default=2.0, ge=0, le=60)
    #: Connections at a time; one more is answered with 503 and closed.
    max_connections: int = Field(default=10_000, ge=8)
    #: A request's headers must be there so long after its first byte, or after its connection was opened, in seconds.
    header_s: float = Field(default=20.0, ge=0.5, allow_inf_nan=False)
    #: A client that for so long takes less than 32 KiB of what waits for it is cut off, and its request is cancelled, in seconds.
    write_s: float = Field(default=30.0, ge=0.5, allow_inf_nan=False)
    #: A connection on which no request is completed for so long is closed, in seconds; longer than a load balancer keeps one idle (60 s).
    idle_s: float = Field(default=75.0, ge=1, allow_inf_nan=False)
    #: How long a request waits for a worker to accept it (its prompt is checked and made into tokens), and from then on for its first token
    #: (others may be before it), in seconds; then it goes to another node. 0: for ever.
    accept_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    first_token_s: float = Field(default=300.0, ge=0, allow_inf_nan=False)
    #: How long running requests may take to end when the gateway is stopped, in seconds.
    drain_s: float = Field(default=25.0, ge=0, allow_inf_nan=False)

    def weight(self, tenant: str) -> float:
        """A tenant's, of `tenant_limits`, else of `limits`."""
        own = self.tenant_limits.get(tenant, self.limits).weight
        return own or self.limits.weight or 1.0

    def max_priority(self, key: ApiKey) -> int:
        """The most urgent priority that a key may ask for: the less urgent one of its own and its tenant's."""
        own = self.tenant_limits.get(key.tenant)
        tenants = own.max_priority if own is not None and own.max_priority is not None else self.limits.max_priority
        return max((p for p in (key.max_priority, tenants) if p is not None), default=0)

    @field_validator("hosts")
    @classmethod
    def _names(cls, value: list[str]) -> list[str]:
        for host in value:
            if not _HOST.fullmatch(host):
                raise ValueError(f"{host!r} is no host; give a name or an address without a port, such as chat.example.org or [fd00::7]")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if not ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; give scheme, host and port, such as https://chat.example.org, or *")
        return value
