"""Who a process is to the others of its fleet, as its certificate says, and who may call what.

A node's store, workers and sidecars share memory, so they are one identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

#: Names in certificates end with it. `.internal` is reserved for private use.
DOMAIN = "upbeat.internal"


class Role(str, Enum):
    """What a process does in its fleet. operator: a person's command line, and health checks."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    NODE = "node"
    OPERATOR = "operator"


class Identity(NamedTuple):
    """A role; name: of a node, as in `node-0`, else empty."""

    role: Role
    name: str = ""

    @property
    def dns(self) -> str:
        """Its DNS name in a certificate (subjectAltName)."""
        return ".".join(filter(None, (self.name, self.role.value, DOMAIN)))

    def __str__(self) -> str:
        return self.name or self.role.value


def node(name: str) -> Identity:
    """The identity of the node `name`."""
    return Identity(Role.NODE, name)


GATEWAY, SCHEDULER, OPERATOR = (Identity(role) for role in (Role.GATEWAY, Role.SCHEDULER, Role.OPERATOR))


def named(name: str) -> Identity:
    """The identity that is written as `name`: a role, else a node's name."""
    return Identity(Role(name)) if name in set(Role) - {Role.NODE} else node(name)


def identity_of(names: Iterable[str]) -> Identity | None:
    """The identity that a certificate's DNS names give; None: none, or more than one."""
    found = {identity for name in names if (identity := _parsed(name)) is not None}
    return found.pop() if len(found) == 1 else None


def _parsed(dns: str) -> Identity | None:
    name = dns.removesuffix(f".{DOMAIN}").rpartition(".")[0]
    for role in Role:
        identity = Identity(role, name)
        if identity.dns == dns and bool(name) == (role is Role.NODE) and "." not in name:
            return identity
    return None


def _methods(service: str, roles: set[Role], *names: str) -> dict[str, frozenset[Role]]:
    return {f"/upbeat.v1.{service}/{name}": frozenset(roles) for name in names}


#: Who may call each method of gRPC; nobody may call others. `StoreReports`, `WorkerReports`, `Attach`, `Flush` and the
#: methods of peers further ask that a node speaks for itself.
MAY_CALL: dict[str, frozenset[Role]] = {
    **_methods("Scheduler", {Role.NODE}, "WorkerReports", "StoreReports"),
    **_methods("Scheduler", {Role.GATEWAY}, "Place", "Advise", "Invalidate", "TurnsTimed", "SloDecided"),
    **_methods("Scheduler", {Role.GATEWAY, Role.OPERATOR}, "Scale"),
    **_methods("Scheduler", {Role.GATEWAY, Role.OPERATOR}, "Watch", "Metrics", "ListSessions", "GetSession"),
    **_methods("Scheduler", {Role.GATEWAY, Role.OPERATOR}, "EraseSession", "Explain", "ExplainModel", "RemoveModel"),
    **_methods("Scheduler", {Role.GATEWAY}, "DeclareWorkflow", "ListWorkflows", "GetWorkflow", "DeleteWorkflow"),
    **_methods("Scheduler", {Role.OPERATOR}, "LeaveNode"),
    **_methods("Scheduler", {Role.GATEWAY, Role.OPERATOR}, "SubmitFinetune", "CancelFinetune"),
    **_methods("Scheduler", {Role.GATEWAY, Role.OPERATOR}, "ListFinetunes", "GetFinetune"),
    **_methods("Worker", {Role.GATEWAY}, "Stream", "Tokenize", "Detokenize", "Http"),
    **_methods("KvStore", {Role.NODE}, "Attach", "PeerIntroduce", "PeerLease", "PeerRelease"),
    **_methods("KvStore", {Role.SCHEDULER}, "Residency"),
    **_methods("KvStore", {Role.NODE, Role.OPERATOR}, "Flush"),
    "/grpc.health.v1.Health/Check": frozenset(Role),
    "/grpc.health.v1.Health/Watch": frozenset(Role),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({Role.OPERATOR}),
}
