"""The keys of sessions whose chunks are encrypted: objects of the blob tier, and those known in memory. Nowhere else.

An object holds a random key, encrypted with its tenant's key (cluster_keys.py). No node's disk has one: a disk alone
cannot be read, and deleting one object makes every copy of the chunks unreadable, on nodes that are down and in backups
too. In return a store that starts while the blob tier is away cannot read its encrypted files until that is back.

Names are in key_names.py, what is encrypted with a key in sealing.py.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Container

import msgpack
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from contracts.errors import PieceLost
from contracts.ids import SessionKey
from kvstore.core.events import Fault
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

    Invariant: a key of a life that `forget` ended is not known again.
    """

    def __init__(self, objects: Objects, keys: ClusterKeys) -> None:
        self._objects = objects
        self._keys = keys
        self._known: OrderedDict[bytes, dict[KeyName, bytes]] = OrderedDict()  #: by the session's tag
        #: The key that new files of the session get.
        self._current: OrderedDict[SessionKey, SessionSecret] = OrderedDict()
        #: Keys made here that the blob tier does not have yet.
        self.unstored: dict[KeyName, tuple[SessionKey, bytes]] = {}
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
        self._use(session, made)
        self._note(made)
        if session != NOBODY:
            self.unstored[made.name] = session, made.key
        return made, session != NOBODY

    def _use(self, session: SessionKey, secret: SessionSecret) -> None:
        self._current[session] = secret
        if len(self._current) > _SESSIONS:
            self._current.popitem(last=False)

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
        return True

    # ---- for stored ones

    def known(self, name: KeyName) -> SessionSecret | None:
        """The key, if it is in memory."""
        key = self._known.get(name.tag, {}).get(name)
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
        try:
            secret = decode_key(self._keys, name, await self._objects.get(name.path))
        except (FileNotFoundError, PieceLost):
            return Fault.ERASED
        except Exception:
            return Fault.UNAVAILABLE
        return secret if self._note(secret) else Fault.ERASED

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
        current = self._current.get(session)
        if current is not None and self._has_ended(current.name):
            del self._current[session]
        for name in [name for name in self.unstored if name.tag == tag and self._has_ended(name)]:
            del self.unstored[name]
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
