"""A host with another DATA/secret than its fleet's, or than its bucket's, does not start; the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from contracts.cluster import secret_id
from contracts.exits import WRONG_USAGE
from kvstore import upkeep
from kvstore.__main__ import KvStoreService
from kvstore.core.events import TierChannel
from kvstore.tiers.objects import ROOT, Directory, Objects
from kvstore.tiers.owner import OBJECT, OwnerUnknown, owner
from runtime import same_secret
from runtime.config_file import changed, cluster_secret, dump_config
from tests.kvstore.conftest import Stack
from tests.kvstore.fake_scheduler import FakeScheduler

OURS, THEIRS = secret_id(b"a" * 32), secret_id(b"b" * 32)


async def test_a_newcomer_with_another_secret_stops_and_says_why(
    make_stack: Callable[..., Stack], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], int]
) -> None:
    """One meets the fleet's scheduler, the other only its bucket."""
    stack, bucket = make_stack(nodes=3), tmp_path / "bucket"
    config = changed(stack.config, {"kv": {"blob_url": bucket.as_uri()}})
    fleets = secret_id(cluster_secret(config.data))
    monkeypatch.setattr(same_secret.SameSecret.__init__, "__defaults__", (lambda: fleets,))
    before = same_secret._REFUSED._value.get()
    async with FakeScheduler(config.scheduler_addresses[0]) as scheduler:
        first = _made(stack, config, 0)
        await _until(lambda: "node-0" in scheduler.held and (bucket / ROOT / OBJECT).exists())
        assert (bucket / ROOT / OBJECT).read_text().strip() == fleets
        alone = changed(config, {"data": str(tmp_path / "alone"), "scheduler": {"port": free_ports(1)}})
        apart = changed(config, {"data": str(tmp_path / "apart"), "kv": {"blob_url": (tmp_path / "none").as_uri()}})
        newcomers = {"bucket": _made(stack, alone, 1), "Scheduler on": _made(stack, apart, 2)}
        for (where, newcomer), its in zip(newcomers.items(), (alone, apart), strict=True):
            await _until(lambda newcomer=newcomer: newcomer.processes[_node(newcomer)].poll() is not None)  # type: ignore[misc]
            node = _node(newcomer)
            assert newcomer.processes[node].returncode == WRONG_USAGE
            (line,) = [line for line in newcomer.log(node).splitlines() if '"error"' in line]
            for word in (where, fleets, secret_id(cluster_secret(its.data)), "copy the file DATA/secret of the fleet"):
                assert word in line
            assert cluster_secret(its.data).hex() not in newcomer.log(node)
        assert same_secret._REFUSED._value.get() > before
        assert "node-2" not in scheduler.held
        assert first.processes[0].poll() is None and "node-0" in scheduler.held
        assert (bucket / ROOT / OBJECT).read_text().strip() == fleets
    for each in (first, *newcomers.values()):
        each.stop()


def _node(stack: Stack) -> int:
    return next(iter(stack.processes))


def _made(stack: Stack, config: Any, node: int) -> Stack:
    file = stack.file.with_name(f"config-{node}.yaml")
    file.write_text(dump_config(config))
    made = Stack(config, file)
    made.start(node)
    return made


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if holds():
                return
            await asyncio.sleep(0.05)


# ---- the bucket's owner ------------------------------------------------------------------------------------------
async def test_a_bucket_belongs_to_whoever_came_first(tmp_path: Path) -> None:
    objects = Objects(Directory(tmp_path / "bucket"))
    assert [await owner(objects, each) for each in (OURS, THEIRS, OURS)] == [OURS] * 3


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"x" * 100_000])
async def test_an_owner_that_cannot_be_read_is_replaced(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / OBJECT).write_bytes(damage)
    assert await owner(Objects(Directory(tmp_path)), OURS) == OURS


async def test_a_bucket_that_does_not_answer_has_no_owner_yet(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(OwnerUnknown) as failed:
        await owner(Objects(Directory(tmp_path / "file" / "bucket")), OURS)
    assert failed.value.tier is TierChannel.BLOB_READ


@pytest.mark.parametrize("own", [True, False])
async def test_only_a_fleets_own_bucket_is_expired_and_swept(
    own: bool, make_stack: Callable[..., Stack], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it answers so late that the store serves already."""
    began: list[str] = []
    asked = asyncio.Event()

    async def answers_late(*_: object) -> bool:
        await asked.wait()
        return own

    def work(name: str) -> Callable[..., Any]:
        async def begun(*_: object) -> None:
            began.append(name)

        return begun

    monkeypatch.setattr(upkeep, "check_owner", answers_late)
    for name in ("measure", "learn", "expire", "sweep"):
        monkeypatch.setattr(upkeep, name, work(name))
    service = KvStoreService(make_stack(nodes=1, blob_expiry_s=1.0).config, 0)
    await service.start()
    await asyncio.sleep(0.1)
    assert began == []
    asked.set()
    if own:
        await _until(lambda: sorted(began) == ["expire", "learn", "measure", "sweep"])
    else:
        await asyncio.sleep(0.2)
        assert began == []
    await service.stop()
