"""Erases sessions on this node until every tier has confirmed: the workers' HBM, the arena, the SSD and the blob tier.

An erasure is journaled before it is answered, and resumed after a restart. Data still in use, or in a tier that does
not answer, is deleted and checked again at growing intervals, and as soon as the tier is back. The first answer comes
when nothing is left or after `ANSWER_S`; if something was left, another follows when it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from contracts.ids import SessionKey
from contracts.kv import Manifest
from kvstore.core import events as ev
from kvstore.core.tombstone import OpenErasure, Tombstone
from kvstore.failpoints import reach
from kvstore.host import StoreHost
from kvstore.learning import SharedListings
from kvstore.metrics import count, log
from kvstore.tiers.blob import PATIENT_S
from kvstore.tiers.journal import Journal, JournalFull
from kvstore.tiers.manifests import manifest_path
from runtime.service import Tasks

#: Seconds until the first answer at the latest.
ANSWER_S = 8.0
_LIST_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0
#: Most erasures that check tiers at a time.
_LOOKING = 4
#: Most that ask the blob tier what it knows of their session at a time, so that they leave its other readers room.
_ASKING = 16
#: File name, beside the SSD's directory.
_JOURNAL = "erasures.journal"


@dataclass(frozen=True, slots=True)
class Answer:
    """An erasure's state. left: by tier, chunks that are or may be still there. taken: it is journaled, so this node
    will complete it."""

    session: SessionKey
    known: bool
    left: dict[str, int]
    number: int = 0
    taken: bool = True

    @property
    def verified(self) -> bool:
        """Whether every tier was checked and nothing is there."""
        return not any(self.left.values())


class Erasing:
    """See the module. answered: callbacks for every answer."""

    def __init__(self, node: StoreHost, tasks: Tasks) -> None:
        self._node = node
        self._tasks = tasks
        self._journal = Journal(node.places.ssd.parent / _JOURNAL)
        self._loaded = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        #: by open erasure, whether its last journal entry is durable
        self._noted: dict[SessionKey, asyncio.Future[bool]] = {}
        self._pursuits: dict[SessionKey, asyncio.Task[None]] = {}
        self._wake: dict[SessionKey, asyncio.Event] = {}
        self._gate = asyncio.Semaphore(_LOOKING)
        self._asking = asyncio.Semaphore(_ASKING)
        self._silent_s = -math.inf  #: when the blob tier last left a question unanswered for PATIENT_S or longer
        self._listings = SharedListings(node, tasks)
        self._left: dict[SessionKey, dict[str, int]] = {}  #: by session, the result of the last check
        self._last: dict[SessionKey, Answer] = {}
        self.answered: list[Callable[[Answer], object]] = []

    # ---- the journal

    async def load(self) -> bool:
        """Read the journal once, and resume open erasures; their chunks are not served from now on.

        False when it cannot be read now: what the SSD holds may have been erased.
        """
        if self._loaded:
            return True
        node = self._node
        try:
            await self._on_thread(self._journal.load)
        except OSError as e:
            log.error("the journal of erasures cannot be read", error=str(e))
            return False
        self._loaded = True
        if self._journal.damaged:
            count("journal_lines_damaged", self._journal.damaged)
            log.error(
                "lines of the journal of erasures are damaged: erase again what was not verified",
                lines=self._journal.damaged,
            )
        is_open = list(self._journal.open.values())
        node.handle(ev.ErasuresReplayed(is_open, self._journal.floor, node.clock.now()))
        for erasure in is_open:
            node.write_back.delete_keys(erasure.tombstone.session, erasure.tombstone.number)
            self._noted[erasure.tombstone.session] = _done(True)
            self._pursue(erasure.tombstone.session, known=True)
        if is_open:
            log.info("resuming erasures", sessions=len(is_open))
        return True

    def note(self, erasure: OpenErasure) -> None:
        """Write the erasure to the journal; `_noted` says when that is done."""
        self._noted[erasure.tombstone.session] = asyncio.ensure_future(self._note(erasure))

    async def _note(self, erasure: OpenErasure) -> bool:
        try:
            await self._on_thread(lambda: self._journal.note(erasure))
        except (OSError, JournalFull) as e:
            count("journal_failures")
            log.error(
                "an erasure could not be noted",
                session=str(erasure.tombstone.session),
                error=str(e) or "too many are open",
            )
            return False
        return True

    async def is_gone(self, session: SessionKey) -> bool:
        """Whether this node holds nothing of the erased session, and will not after a restart either."""
        node = self._node
        grave = node.store.erasure.graves.get(session)
        if grave is None:
            return True
        if not node.knows_ssd or not node.store.erasure.settled(session):
            return False
        if session not in node.store.index.manifests and await node.catalogue.holds(manifest_path(session)):
            return False
        chunks = {key: fingerprint for key, fingerprint in grave.chunks.items() if key not in node.store.index.names}
        return not await asyncio.to_thread(self._remove_files, chunks)

    async def note_floor(self) -> bool:
        """Journal the highest number of the erasures applied here."""
        floor = self._node.store.erasure.graves.floor
        try:
            await self._on_thread(lambda: self._journal.note_floor(floor))
        except OSError:
            return False
        return True

    async def _on_thread(self, work: Callable[[], None]) -> None:
        """Run on the journal's thread. Raises OSError when this store does not hold the directory's lock."""
        if not self._node.may_write():
            raise OSError("the node's directory is not locked")
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.submit(self._journal.close)
        self._thread.shutdown(wait=False)

    # ---- erasing

    def open(self) -> list[Answer]:
        """The last answer of every open erasure."""
        graves = self._node.store.erasure.graves
        return [
            self._last.get(e.tombstone.session) or Answer(e.tombstone.session, True, {"blob": 1}, e.tombstone.number)
            for e in graves.open()
        ]

    async def erase(self, session: SessionKey, number: int = 0) -> None:
        """Erase the session, after learning which other sessions exist, so that shared chunks stay. A session that
        nobody knows costs no listing. number: of a repeated erasure; 0: a new one. `answered` callbacks are called
        once, or again when the session is finally gone."""
        node, begun = self._node, self._node.clock.now()
        found, tombstones = await self._ask(session, begun)
        unknown = found is ev.Fault.MISSING and tombstones == []
        if not unknown or self._has(session):
            await self._learn_others()
        if isinstance(found, Manifest):
            node.handle(ev.ManifestFetched(session, found, node.clock.now()))
        here, erasure = self._has(session), node.store.erasure
        node.handle(ev.TombstonesListed(tombstones or [], node.clock.now()))
        if unknown and not here:
            self._tell(Answer(session, False, {}, number))  # unknown everywhere; nothing is recorded
            return
        known = here or isinstance(found, Manifest) or found is ev.Fault.CORRUPT
        reach("erase.before")
        node.handle(
            ev.SessionErased(session, node.clock.now(), number, blind=not here and found is ev.Fault.UNAVAILABLE)
        )
        reach("erase.queued")
        noted = self._noted.get(session)
        taken = noted is None or await noted
        reach("erase.noted")
        if not taken:
            self._tell(Answer(session, known, {"blob": 1}, erasure.graves.number(session), taken=False))
        self._pursue(session, known=known, begun=begun)

    def _has(self, session: SessionKey) -> bool:
        """Whether this node has something of the session, or may after an erasure that is still open."""
        index, erasure = self._node.store.index, self._node.store.erasure
        return session in index.manifests or session in index.claims or erasure.is_erasing(session)

    async def _ask(self, session: SessionKey, begun: float) -> tuple[Manifest | ev.Fault, list[Tombstone] | None]:
        """What blob knows of the session; also deletes what older formats left of it. Waits for its turn. A blob
        tier that was silent meanwhile is not asked: else the last of many erasures would wait for all before it."""
        node = self._node
        async with self._asking:
            if self._silent_s > begun or not node.store.meter.admits(ev.TierChannel.BLOB_READ):
                return ev.Fault.UNAVAILABLE, None
            asked_s = node.clock.now()
            asked = (node.blob.find_manifest(session), node.blob.tombstones.find(session))
            found, tombstones = await asyncio.gather(*asked, return_exceptions=True)
            if isinstance(found, BaseException) or found is ev.Fault.UNAVAILABLE:
                if node.clock.now() - asked_s >= PATIENT_S:
                    self._silent_s = node.clock.now()
                found = ev.Fault.UNAVAILABLE
            else:
                await node.older.erase(session, {})
            return found, tombstones if not isinstance(tombstones, BaseException) else None

    async def _learn_others(self) -> None:
        """Learn which other sessions exist, as far as blob lists them within _LIST_S."""
        if self._node.store.meter.admits(ev.TierChannel.BLOB_READ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LIST_S):
                    await self._listings.learn()

    def hurry(self) -> None:
        """A tier is back: erasures waiting for it continue at once."""
        for wake in self._wake.values():
            wake.set()

    def _pursue(self, session: SessionKey, *, known: bool, begun: float | None = None) -> None:
        """Continue until the session is gone. A repeated erasure is checked at once and answered again. begun: when it
        was ordered."""
        self._last.pop(session, None)
        if begun is not None:
            wait_s = max(0.0, begun + ANSWER_S - self._node.clock.now())
            asyncio.get_running_loop().call_later(wait_s, self._overdue, session, known)
        if session in self._pursuits:
            self._wake[session].set()
            return
        self._wake[session] = asyncio.Event()
        self._pursuits[session] = self._tasks.start(self._pursuit(session, known), "erase")

    def _overdue(self, session: SessionKey, known: bool) -> None:
        """Answer that the erasure continues, unless its end was reported."""
        if session in self._pursuits and session not in self._last:
            left = self._left.get(session) or self._left_here(session) | {"blob": 1}
            self._tell(Answer(session, known, left, self._node.store.erasure.graves.number(session)))
            count("erasures_unfinished")
            log.warning("an erased session is still somewhere", session=str(session), left=left)

    async def _pursuit(self, session: SessionKey, known: bool) -> None:
        node, wake = self._node, self._wake[session]
        pause_s = _FIRST_PAUSE_S
        try:
            while (grave := node.store.erasure.graves.get(session)) is not None and grave.is_open:
                async with self._gate:
                    left = self._left[session] = await self._step(session, again=pause_s > 1.0)
                answer = Answer(session, known, left, grave.number)
                if answer.verified and await self._end(session):
                    self._tell(answer)
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await wake.wait()
                pause_s = _FIRST_PAUSE_S * 32 if wake.is_set() else min(2 * pause_s, _LONGEST_PAUSE_S)
                wake.clear()
            self._tell(Answer(session, known, {}, node.store.erasure.graves.number(session)))
        finally:
            del self._pursuits[session], self._wake[session]
            self._last.pop(session, None)
            self._left.pop(session, None)

    async def _end(self, session: SessionKey) -> bool:
        """Every tier has confirmed: close the erasure and journal that."""
        node = self._node
        noted = self._noted.get(session)
        if noted is not None and not noted.done():
            await noted
        reach("erase.confirmed")
        node.handle(ev.ErasureEnded(session, node.clock.now()))
        self._noted.pop(session, None)
        with contextlib.suppress(OSError):  # otherwise it ends again after a restart
            await self._on_thread(lambda: self._journal.done(session))
        return True

    def _tell(self, answer: Answer) -> None:
        self._last[answer.session] = answer
        for told in self.answered:
            told(answer)

    async def _step(self, session: SessionKey, *, again: bool) -> dict[str, int]:
        """Check every tier, and delete what is there. again: order deletions in blob again. Returns chunks left by
        tier."""
        node = self._node
        if not node.store.meter.admits(ev.TierChannel.BLOB_READ):
            return self._left_here(session) | {"blob": 1}
        found = await node.blob.find_manifest(session)
        if isinstance(found, Manifest):
            node.handle(ev.ManifestFetched(session, found, node.clock.now()))
        if found is not ev.Fault.UNAVAILABLE:
            node.handle(ev.ErasureSeen(session, node.clock.now()))
        grave = node.store.erasure.graves.get(session)
        if grave is None:
            return {}
        tombstone = Tombstone(session, grave.number, dict(grave.chunks))
        over = not isinstance(found, Manifest) or node.store.erasure.void(found)
        left = await self._look(tombstone)
        if found is ev.Fault.UNAVAILABLE or (isinstance(found, Manifest) and over) or found is ev.Fault.CORRUPT:
            left["blob"] += 1
        if not await node.blob.tombstones.has(tombstone):
            left["blob"] += 1
        if not await node.blob.session_keys.are_gone(session, grave.number):
            left["blob"] += 1
        if over and await node.catalogue.holds(manifest_path(session)):
            left["ssd"] += 1
        if not await node.older.erase(session, tombstone.chunks):
            left["blob"] += 1
        if left["blob"] and again:
            keys = [key for key in tombstone.chunks if key not in node.store.index.names]
            node.write_back.erase_again(tombstone, keys, manifest=over and session not in node.store.index.manifests)
        return left

    def _left_here(self, session: SessionKey) -> dict[str, int]:
        erasure = self._node.store.erasure
        grave = erasure.graves.get(session)
        return {"hbm": erasure.graves.unheard(session)} | erasure.left(grave.chunks if grave is not None else ())

    async def _look(self, tombstone: Tombstone) -> dict[str, int]:
        """By tier, how many of its chunks are or may be there. Chunks that a session names by now do not count."""
        node, index = self._node, self._node.store.index
        chunks = {key: fingerprint for key, fingerprint in tombstone.chunks.items() if key not in index.names}
        left = self._left_here(tombstone.session)
        if chunks:
            left["ssd"] = max(left["ssd"], await asyncio.to_thread(self._remove_files, chunks))
        if not left["blob"]:
            left["blob"] = sum(
                await asyncio.gather(*(node.blob.has_chunk(key, fingerprint) for key, fingerprint in chunks.items()))
            )
        models: dict[bytes, list[bytes]] = {}
        for key, fingerprint in chunks.items():
            models.setdefault(fingerprint, []).append(key)
        for fingerprint, keys in models.items():
            asked = [w.hbm(fingerprint, keys) for w in node.workers.values() if fingerprint in w.fingerprints]
            for hbm in await asyncio.gather(*asked):
                left["hbm"] += len(keys) if hbm is None else max(hbm.layer_chunks, default=0)
        return left

    def _remove_files(self, chunks: dict[bytes, bytes]) -> int:
        """How many of the chunks still have a file. Deletes files that the core does not know."""
        left = 0
        for key, fingerprint in chunks.items():
            path = self._node.ssd.path(key, fingerprint)
            with contextlib.suppress(OSError):
                if key not in self._node.store.index.chunks:
                    path.unlink(missing_ok=True)
            left += path.exists()
        return left


def _done(value: bool) -> asyncio.Future[bool]:
    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future
