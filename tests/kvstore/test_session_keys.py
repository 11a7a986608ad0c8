"""The keys of sessions: made once, stored encrypted, shared by nodes, and gone for ever once erased."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from obstore.store import LocalStore, MemoryStore

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core.events import Fault
from kvstore.core.named import Named
from kvstore.finding import HintedManifests
from kvstore.tiers import session_keys as module
from kvstore.tiers.key_names import KeyName, name_of
from kvstore.tiers.objects import Objects
from kvstore.tiers.sealing import SessionSecret
from kvstore.tiers.session_keys import NOBODY, SessionKeys
from runtime.clock import RealClock
from tests.kvstore.tier_harness import KEYS

A, B = SessionKey("tenant", "a"), SessionKey("tenant", "b")


@pytest.fixture(params=["memory", "directory"])
def objects(request: pytest.FixtureRequest, tmp_path) -> Objects:
    return Objects(MemoryStore() if request.param == "memory" else LocalStore(tmp_path / "blob", mkdir=True))


def node(objects: Objects) -> SessionKeys:
    return SessionKeys(objects, KEYS)


async def paths(objects: Objects) -> set[str]:
    return {path async for page in objects.names("keys/") for path in page}


async def made(keys: SessionKeys, session: SessionKey, life: int = 0) -> SessionSecret:
    """A stored key."""
    secret, new = keys.current(session, life)
    assert new and await keys.store(secret.name)
    return secret


async def test_a_key_is_made_once_stored_encrypted_and_found_by_other_nodes(objects):
    ours, theirs = node(objects), node(objects)
    secret = await made(ours, A)
    assert ours.current(A, 0) == (secret, False) and not ours.unstored
    assert await paths(objects) == {secret.name.path} and name_of(secret.name.path) == secret.name
    data = await objects.get(secret.name.path)
    assert secret.key not in data
    assert theirs.known(secret.name) is None
    assert await theirs.find(secret.name) == secret == theirs.known(secret.name)


async def test_hints_of_made_up_names_cost_one_read_each_and_few_at_a_time(objects):
    await made(node(objects), A)
    keys, listed, running, told = node(objects), [], [], []
    names, most = objects.names, []

    async def get_manifest(session: SessionKey) -> Manifest | None:
        running.append(session)
        most.append(len(running))
        await asyncio.sleep(0)
        running.remove(session)
        return Manifest(A, "m", b"f" * 32, [], 0, 0.0) if session == A else None

    objects.names = lambda prefix: listed.append(prefix) or names(prefix)
    blob = SimpleNamespace(get_manifest=get_manifest, session_keys=keys)
    host = SimpleNamespace(blob=blob, clock=RealClock(), handle=told.append)
    reads = HintedManifests(host)  # type: ignore[arg-type]
    await asyncio.gather(*(reads.fetch(s) for s in [A, *(SessionKey("t", f"{n}") for n in range(100))]))
    assert len(told) == 101 and len(most) == 101 and max(most) == 16
    assert len(listed) == 1 and keys.current(A, 0)[1] is False


async def test_a_hint_brings_a_sessions_keys_beforehand_and_new_files_use_them(objects):
    secret = await made(node(objects), A)
    later = node(objects)
    await later.learn(A)
    assert later.known(secret.name) == secret and later.current(A, 0) == (secret, False)


async def test_sessions_have_different_keys_and_names_that_tell_nothing(objects):
    keys = node(objects)
    a, b = await made(keys, A), await made(keys, B)
    assert a.key != b.key and a.name.tag != b.name.tag
    assert KEYS.tag(SessionKey("ab", "c")) != KEYS.tag(SessionKey("a", "bc"))


async def test_readers_at_the_same_time_share_one_read(objects):
    secret = await made(node(objects), A)
    reads, get = 0, objects.get

    async def counted(path: str) -> bytes:
        nonlocal reads
        reads += 1
        return await get(path)

    objects.get = counted  # type: ignore[method-assign]
    assert await asyncio.gather(*(node_.find(secret.name) for node_ in [node(objects)] * 20)) == [secret] * 20
    assert reads == 1


async def test_an_erased_life_ends_its_keys_on_every_node_and_leaves_the_next_lifes(objects):
    ours, theirs = node(objects), node(objects)
    old, kept, other = await made(ours, A, 1), await made(theirs, A, 5), await made(ours, B, 1)
    assert await theirs.find(old.name) == old
    assert await ours.erase(A, 5) and await ours.are_gone(A, 5)
    assert await paths(objects) == {kept.name.path, other.name.path}
    assert ours.known(old.name) is None and await ours.find(old.name) is Fault.ERASED
    theirs.forget(A, 5)  # as when it reads the tombstone
    assert await theirs.find(old.name) is Fault.ERASED
    assert theirs.current(A, 5) == (kept, False)
    assert await node(objects).find(old.name) is Fault.ERASED
    fresh, new = ours.current(A, 2)
    assert new and fresh.name.life >= 5, "a key of an ended life would be deleted with the next try"


async def test_a_key_that_is_put_back_after_its_erasure_is_not_used_by_a_node_that_erased_it(objects):
    keys = node(objects)
    secret = await made(keys, A)
    stolen = await objects.get(secret.name.path)
    assert await keys.erase(A, 1)
    assert await objects.put("key", secret.name.path, stolen)
    assert await keys.find(secret.name) is Fault.ERASED
    assert not await keys.are_gone(A, 1)


async def test_a_key_erased_before_it_was_stored_is_never_stored(objects):
    keys = node(objects)
    secret, _ = keys.current(A, 0)
    keys.forget(A, 1)
    assert await keys.store(secret.name) and not await paths(objects)


async def test_a_read_that_was_on_its_way_during_the_erasure_brings_nothing_back(objects):
    secret = await made(node(objects), A)
    keys, get = node(objects), objects.get

    async def slow(path: str) -> bytes:
        data = await get(path)
        keys.forget(A, 1)
        return data

    objects.get = slow  # type: ignore[method-assign]
    assert await keys.find(secret.name) is Fault.ERASED and keys.known(secret.name) is None


class Away:
    """A blob tier that does not answer."""

    def __getattr__(self, name: str) -> object:
        raise OSError("away")


async def test_without_the_blob_tier_a_key_is_unavailable_and_not_erased():
    keys = SessionKeys(Objects(Away()), KEYS)
    assert await keys.find(KeyName(bytes(16), 0, bytes(8))) is Fault.UNAVAILABLE
    secret, _ = keys.current(A, 0)
    assert not await keys.store(secret.name) and secret.name in keys.unstored
    assert await keys.find(secret.name) == secret
    assert not await keys.erase(A, 1) and not await keys.are_gone(A, 1)
    assert keys.known(secret.name) is None, "what is erased here is not read again, whatever the blob tier does"


async def test_a_damaged_key_object_locks_its_chunks_and_deletes_none(objects):
    secret = await made(node(objects), A)
    await objects.put("key", secret.name.path, b"UPBEATSK\x01nonsense")
    assert await node(objects).find(secret.name) is Fault.UNAVAILABLE


async def test_an_answer_that_is_damaged_once_is_asked_for_again(objects, monkeypatch):
    secret, get, asked = await made(node(objects), A), objects.get, 0

    async def damaged_once(path):
        nonlocal asked
        asked += 1
        data = await get(path)
        return data if asked > 1 else data[:-1] + bytes([data[-1] ^ 1])

    monkeypatch.setattr(objects, "get", damaged_once)
    assert await node(objects).find(secret.name) == secret and asked == 2


async def test_an_expired_session_gets_a_new_key_and_its_erasure_ends_that_one_too(objects):
    keys = node(objects)
    first = await made(keys, A)
    keys.let_expire(A)
    await keys.delete_expired(A)
    assert await node(objects).find(first.name) is Fault.ERASED
    second = await made(keys, A)
    assert second.name != first.name and second.name.life == first.name.life
    assert not await keys.are_gone(A, 1)
    assert await keys.erase(A, 1) and await keys.are_gone(A, 1) and not await paths(objects)


async def test_a_key_in_use_that_another_nodes_expiry_deleted_is_stored_again(objects, monkeypatch):
    here, elsewhere = node(objects), node(objects)
    secret = await made(here, A)
    elsewhere.let_expire(A)
    await elsewhere.delete_expired(A)
    assert await here.confirm(secret.name), "it was there a moment ago"
    monkeypatch.setattr(module, "_CONFIRM_S", 0.0)
    assert await here.confirm(secret.name) is False and secret.name in here.unstored
    assert await here.store(secret.name) and await elsewhere.find(secret.name) == secret


async def test_keys_in_use_stay_known_however_many_others_are_read(objects, monkeypatch):
    monkeypatch.setattr(module, "_SESSIONS", 3)
    keys = node(objects)
    nobodys, _ = keys.current(NOBODY, 0)
    unstored, _ = keys.current(A, 0)
    for n in range(10):
        await keys.find((await made(node(objects), SessionKey("t", f"s{n}"))).name)
        keys.current(SessionKey("t", f"own-{n}"), 0)
    assert keys.known(nobodys.name) == nobodys and keys.current(NOBODY, 0)[0] == nobodys
    assert keys.known(unstored.name) == unstored, "it is to be stored still"


async def test_the_key_of_nobodys_chunks_is_never_stored(objects):
    keys = node(objects)
    secret, new = keys.current(NOBODY, 0)
    assert not new and not keys.unstored and await keys.store(secret.name) and not await paths(objects)
    assert keys.known(secret.name) == secret


async def test_keys_of_unknown_sessions_are_swept_at_the_second_sweep_that_finds_them_so(objects):
    keys = node(objects)
    named, orphan = await made(keys, A), await made(keys, B)
    known = Named()
    known.add(keys.tags([A]))
    assert [await keys.sweep(known, 0.0) for _ in range(3)] == [0, 0, 0], "those are not old enough"
    assert [await keys.sweep(known, 1e12) for _ in range(3)] == [0, 1, 0]
    assert await paths(objects) == {named.name.path} and orphan.name.path not in await paths(objects)
