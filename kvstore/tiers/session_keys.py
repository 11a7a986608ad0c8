"""The keys of sessions whose chunks are encrypted: objects of the blob tier, and those known in memory. Nowhere else.

An object holds a random key, encrypted with its tenant's key (cluster_keys.py). No node's disk has one: a disk alone
cannot be read, and deleting one object makes every copy of the chunks unreadable, on nodes that are down and in backups
too. In return a store that starts while the blob tier is away cannot read its encrypted files until that is back.

Names are in key_names.py, what is encrypted with a key in sealing.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Container

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from kvstore.core.events import Fault
from kvstore.metrics import count
from kvstore.tiers.cluster_keys import ClusterKeys
from kvstore.tiers.key_names import PREFIX, KeyName, folder_of, name_of
from kvstore.tiers.objects import Objects
from kvstore.tiers.sealing import SessionSecret

_MAGIC = b"UPBEATSK\x01"
_KEY_BYTES, _NONCE_BYTES = 32, 12
#: Most sessions whose keys, and whose ends of lives, are kept in memory. Keys of others are read again.
_SESSIONS, _ENDED = 100_000, 100_000
#: The owner of chunks that no session names. Its key is never stored, and differs in every process.
NOBODY = SessionKey("", "")
#: Most keys of one session that are read beforehand.
_LEARNED = 32
#: A key in use is looked for in the blob tier this often, in seconds: another node may have let its session expire.
_CONFIRM_S = 60.0


def encode_key(keys: ClusterKeys, tenant: str, secret: SessionSecret) -> bytes:
    """The object's bytes: the key, encrypted."""
    nonce = os.urandom(_NONCE_BYTES)
    wrapped = AESGCM(keys.of_tenant(tenant)).encrypt(nonce, secret.key, _bound(secret.name, tenant))
    return _MAGIC + bytes(msgpack.packb([tenant, nonce, wrapped]))


def decode_key(keys: ClusterKeys, name: KeyName, data: bytes) -> SessionSecret:
    """The key in the object of this name. Raises PieceLost when it is not what was written there."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise PieceLost("no session key")
    try:
        tenant, nonce, wrapped = msgpack.unpackb(data[len(_MAGIC) :])
        key = AESGCM(keys.of_tenant(tenant)).decrypt(nonce, wrapped, _bound(name, tenant))
    except (InvalidTag, ValueError, TypeError, AttributeError, msgpack.UnpackException) as e:
        raise PieceLost("no session key of this cluster") from e
    if len(key) != _KEY_BYTES:
        raise PieceLost("no session key")
    return SessionSecret(name, key)


def _bound(name: KeyName, tenant: str) -> bytes:
    return _MAGIC + name.pack() + tenant.encode("utf-8", "surrogatepass")


class SessionKeys:
    """See the module. Used from one event loop, except `known`, which any thread may call. A failure is a value, as in
    blob.py.

    Invariants: a key of a life that `forget` ended is not known again; `_own` has exactly the keys that new files get,
    and those that are not stored yet.
    """

    def __init__(self, objects: Objects, keys: ClusterKeys) -> None:
        self._objects = objects
        self._keys = keys
        self._known: OrderedDict[bytes, dict[KeyName, bytes]] = OrderedDict()  #: by the session's tag
        #: The key that new files of the session get.
        self._current: OrderedDict[SessionKey, SessionSecret] = OrderedDict()
        #: Keys made here that the blob tier does not have yet.
        self.unstored: dict[KeyName, tuple[SessionKey, bytes]] = {}
        self._own: dict[KeyName, tuple[SessionKey, bytes]] = {}
        self._confirmed_s: dict[KeyName, float] = {}  #: of keys that new files get: when the blob tier had them
        self._ended: OrderedDict[bytes, int] = OrderedDict()  #: by tag, the number below which lives have ended
        self._asking: dict[KeyName, asyncio.Task[SessionSecret | Fault]] = {}
        self._unclaimed: set[str] = set()  #: paths of keys of no known session, at the last sweep

    # ---- for new files

    def current(self, session: SessionKey, life: int) -> tuple[SessionSecret, bool]:
        """The session's key for new files, made if there is none; and whether it is then to be stored (`store`). life:
        the session's."""
        secret = self._current.get(session)
        if secret is not None:
            self._current.move_to_end(session)
            return secret, False
        tag = self._keys.tag(session)
        made = SessionSecret(KeyName(tag, max(life, self._ended.get(tag, 0)), os.urandom(8)), os.urandom(_KEY_BYTES))
        if session != NOBODY:
            self.unstored[made.name] = session, made.key
        self._use(session, made)
        return made, session != NOBODY

    def _use(self, session: SessionKey, secret: SessionSecret) -> None:
        self._current[session] = secret
        self._own[secret.name] = session, secret.key
        if len(self._current) > _SESSIONS:
            # Nobody's key is used by all that belongs to nobody, and is nowhere else.
            oldest = next(one for one in self._current if one != NOBODY)
            self._disuse(oldest)

    def _disuse(self, session: SessionKey) -> None:
        """New files of the session get another key."""
        secret = self._current.pop(session)
        self._confirmed_s.pop(secret.name, None)
        if secret.name not in self.unstored:
            self._own.pop(secret.name, None)

    async def store(self, name: KeyName) -> bool:
        """Store a key that was made here. True when it is stored, or was erased meanwhile."""
        made = self.unstored.get(name)
        if made is None:
            return True
        session, key = made
        if not await self._objects.put(
            "key", name.path, encode_key(self._keys, session.tenant, SessionSecret(name, key))
        ):
            return False
        self.unstored.pop(name, None)
        self._confirmed_s[name] = time.monotonic()
        current = self._current.get(session)
        if current is None or current.name != name:
            self._own.pop(name, None)
            self._confirmed_s.pop(name, None)
        return True

    async def confirm(self, name: KeyName) -> bool | None:
        """Whether the blob tier has the key, asked anew now and then; None: it does not answer. One that new files get,
        and that is gone because another node let its session expire, is unstored again. Nobody's counts as stored."""
        own = self._own.get(name)
        if own is not None and own[0] == NOBODY:
            return True
        if time.monotonic() - self._confirmed_s.get(name, -_CONFIRM_S) < _CONFIRM_S:
            return True
        there = await self._objects.has(name.path)
        own = self._own.get(name)
        if there and own is not None:
            self._confirmed_s[name] = time.monotonic()
        elif there is False and own is not None:
            self.unstored[name] = own
        return there

    # ---- for stored ones

    def known(self, name: KeyName) -> SessionSecret | None:
        """The key, if it is in memory."""
        own = self._own.get(name)
        key = own[1] if own is not None else self._known.get(name.tag, {}).get(name)
        return SessionSecret(name, key) if key is not None else None

    async def find(self, name: KeyName) -> SessionSecret | Fault:
        """The key; ERASED when there is none any more, or UNAVAILABLE. Callers at the same time share one read."""
        found = self.known(name)
        if found is not None:
            return found
        asking = self._asking.get(name)
        if asking is None:
            asking = self._asking[name] = asyncio.ensure_future(self._read(name))
            asking.add_done_callback(lambda _: self._asking.pop(name, None))
        return await asyncio.shield(asking)

    async def _read(self, name: KeyName) -> SessionSecret | Fault:
        if self._has_ended(name):
            return Fault.ERASED
        for _ in range(2):  # asked twice, because the answer may be damaged and not the object
            try:
                secret = decode_key(self._keys, name, await self._objects.get(name.path))
            except FileNotFoundError:
                return Fault.ERASED
            except PieceLost:
                count("session_keys_damaged")
            except Exception:
                break
            else:
                return secret if self._note(secret) else Fault.ERASED
        return Fault.UNAVAILABLE

    async def learn(self, session: SessionKey) -> None:
        """Read the session's keys, so that none is waited for when its chunks come."""
        tag = self._keys.tag(session)
        if tag in self._known:
            return
        names: list[KeyName] = []
        try:
            async for page in self._objects.names(folder_of(tag) + "/"):
                names += [name for path in page if (name := name_of(path)) is not None]
        except Exception:
            return
        found = await asyncio.gather(*(self.find(name) for name in sorted(names)[-_LEARNED:]))
        secrets = [secret for secret in found if isinstance(secret, SessionSecret)]
        if secrets and session not in self._current:
            self._use(session, secrets[-1])

    def _note(self, secret: SessionSecret) -> bool:
        """Keep the key in memory, unless its life has ended. Returns whether it is kept."""
        if self._has_ended(secret.name):
            return False
        tag = secret.name.tag
        self._known[tag] = {**self._known.get(tag, {}), secret.name: secret.key}
        self._known.move_to_end(tag)
        if len(self._known) > _SESSIONS:
            self._known.popitem(last=False)
        return True

    def _has_ended(self, name: KeyName) -> bool:
        return name.life < self._ended.get(name.tag, 0)

    # ---- erasing

    def forget(self, session: SessionKey, number: int) -> None:
        """Forget the keys of the session's lives below `number`, at once and until the process ends."""
        tag = self._keys.tag(session)
        self._ended[tag] = max(number, self._ended.pop(tag, 0))
        if len(self._ended) > _ENDED:
            self._ended.popitem(last=False)
        for name in [name for name in self.unstored if name.tag == tag and self._has_ended(name)]:
            del self.unstored[name]
            self._own.pop(name, None)
        current = self._current.get(session)
        if current is not None and self._has_ended(current.name):
            self._disuse(session)
        left = {name: key for name, key in self._known.pop(tag, {}).items() if not self._has_ended(name)}
        if left:
            self._known[tag] = left

    async def erase(self, session: SessionKey, number: int) -> bool:
        """Delete the keys of the session's lives below `number`, here and in the blob tier, durably. True when none is
        left there; False when some are, or the tier does not answer."""
        self.forget(session, number)
        try:
            for path in await self._ended_paths(session, number):
                await self._objects.delete_durably("key", path)
            return not await self._ended_paths(session, number)
        except Exception:
            return False

    def let_expire(self, session: SessionKey) -> None:
        """Forget all keys of the session here. Its life goes on: its next chunks get a new key."""
        tag = self._keys.tag(session)
        for name in [name for name in self.unstored if name.tag == tag]:
            del self.unstored[name]
            self._own.pop(name, None)
        if session in self._current:
            self._disuse(session)
        self._known.pop(tag, None)

    async def delete_expired(self, session: SessionKey) -> None:
        """Delete the session's keys from the blob tier, except those made here since it expired. The orphans' sweep
        finds what could not be deleted."""
        with contextlib.suppress(Exception):
            folder = folder_of(self._keys.tag(session)) + "/"
            paths = [path async for page in self._objects.names(folder) for path in page]
            for path in paths:
                name = name_of(path)
                if name is None or name not in self._own:
                    await self._objects.delete(path)

    async def are_gone(self, session: SessionKey, number: int) -> bool:
        """Whether the blob tier has no key of the session's lives below `number`."""
        try:
            return not await self._ended_paths(session, number)
        except Exception:
            return False

    async def _ended_paths(self, session: SessionKey, number: int) -> list[str]:
        """Raises when the blob tier does not answer."""
        folder = folder_of(self._keys.tag(session)) + "/"
        paths = [path async for page in self._objects.names(folder) for path in page]
        return [path for path in paths if (name := name_of(path)) is None or name.life < number]

    async def sweep(self, named: Container[bytes], before_s: float) -> int:
        """Delete keys written before that time, by the store's clock, whose session is unknown at this sweep and was at
        the last one. Returns their number. named: tags of all sessions, doubled. Raises when the store fails."""
        before, self._unclaimed = self._unclaimed, set()
        removed = 0
        async for path in self._older(before_s):
            name = name_of(path)
            if name is not None and name not in self.unstored and name.tag * 2 not in named:
                if path in before:
                    await self._objects.forget(path)
                    removed += 1
                else:
                    self._unclaimed.add(path)
        return removed

    async def _older(self, before_s: float) -> AsyncIterator[str]:
        async for page in self._objects.listed(PREFIX + "/"):
            for item in page:
                if item.written < before_s:
                    yield item.path

    def tags(self, sessions: list[SessionKey]) -> list[bytes]:
        """Their tags, doubled, as `sweep` wants them."""
        return [self._keys.tag(session) * 2 for session in sessions]
