"""Identities as names in certificates, and the table of who may call what."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FileDescriptor

from contracts.identity import GATEWAY, MAY_CALL, OPERATOR, SCHEDULER, Identity, Role, identity_of, named, node
from contracts.v1 import kvstore_pb2, scheduler_pb2, worker_pb2


@pytest.mark.parametrize("who", [GATEWAY, SCHEDULER, OPERATOR, node("node-0"), node("node-17")])
def test_an_identity_comes_back_from_its_name(who: Identity) -> None:
    assert identity_of([who.dns]) == who == named(str(who))
    assert identity_of(["example.org", who.dns, who.dns]) == who


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["gateway"],
        ["upbeat.internal"],
        ["node.upbeat.internal"],
        ["a.gateway.upbeat.internal"],
        ["a.b.node.upbeat.internal"],
        [".node.upbeat.internal"],
        ["*.node.upbeat.internal.example.org"],
        ["gateway.upbeat.internal", "scheduler.upbeat.internal"],
        ["node-0.node.upbeat.internal", "node-1.node.upbeat.internal"],
    ],
)
def test_other_names_and_two_identities_are_nobody(names: list[str]) -> None:
    assert identity_of(names) is None


def test_every_method_has_its_callers() -> None:
    files: list[FileDescriptor] = [scheduler_pb2.DESCRIPTOR, kvstore_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR]
    methods = {
        f"/{service.full_name}/{method.name}"
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    }
    assert methods == {name for name in MAY_CALL if name.startswith("/upbeat.")}
    assert all(Role.GATEWAY not in MAY_CALL[name] for name in methods if "KvStore" in name), "KV is the nodes' own"
