"""Compiles the grammars of requests, and computes their masks within limits (docs/design/0009).

A grammar is compiled twice: first in a helper process (`worker.sampling.grammar_child`), which is killed when it takes
too much time or memory; if that succeeds, here, with the first mask, on a thread beside the engine's. Verdicts are
cached (`worker.core.grammar_cache`). The library's limits bound each later mask, and a time budget bounds an answer's
masks.

Grammars use the detokeniser's bytes of every token, so they constrain exactly what the client reads. Requests without a
grammar cost nothing; tables and processes are created with the first grammar.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from llguidance import LLMatcher, LLTokenizer
from prometheus_client import Counter

from contracts.errors import RateLimited, Unavailable
from contracts.request import GenerateRequest
from runtime import niceness, telemetry
from runtime.children import ChildCannotStart, ChildDied, Children, ChildrenBusy, ChildTimeout
from runtime.sections import WorkerSection
from worker.core.grammar_cache import GrammarCache
from worker.core.grammar_spec import GrammarSpec, read_answer, spec_of, unsupported
from worker.core.tool_calls import CallReader
from worker.sampling.grammar_child import SECONDS, too_long
from worker.sampling.output import Guide, not_kept
from worker.sampling.vocabulary import Spellings, compiled, reason, tables
from worker.text.codec import TextCodec

#: Size of the cache of compiled grammars, and the share that one tenant may hold.
_KEPT_BYTES, _TENANT_SHARE = 256 << 20, 0.5
#: Bytes of an entry in addition to its grammar.
_ENTRY_BYTES = 64 << 10
_REFUSAL_BYTES = 1 << 10
#: How long refusals for time, and for a crash or memory, are cached; a later attempt may succeed.
_REFUSED_S = 600.0
_DIED_S = 60.0
#: A helper process's memory in addition to its tables.
_CHILD_BYTES = 256 << 20
#: Limit of a tenant's waiting grammars, seconds to wait for a helper, and seconds for a helper to answer.
_WAITING, _WAIT_S, _BUSY_S = 16, 10.0, 4.0
#: Processor time of an answer's masks on the engine's thread: in total, plus for each mask.
_MASKS_S, _MASK_S = 0.25, 0.001
_OUTCOMES = Counter(
    "upbeat_worker_grammars",
    "Grammars asked for, outcome: known, compiled, refused, killed (the compiler died), busy (429 or 503)",
    ["outcome"],
    registry=telemetry.REGISTRY,
)
telemetry.from_zero(_OUTCOMES, "known", "compiled", "refused", "killed", "busy")


class GrammarConstraint:
    """The state of one answer in its grammar. One thread at a time.

    error: why the answer cannot go on; empty if it can. After an error, `allowed` is meaningless.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._words = np.zeros(vocab_size // 32 + 1, np.int32)  # with the stand-in's bit (`GrammarCompiler.spellings`)
        self._allowed: npt.NDArray[np.bool_] | None = None
        self._left_s = _MASKS_S
        self.error = ""

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.bool_]:
        """See `worker.sampling.sampler.Constraint`."""
        if self._allowed is None:
            began = time.thread_time()
            if not self.error:
                self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            bits = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
            self._allowed = bits.view(np.bool_)
            if self.error or self._matcher.is_error() or not bits.any():
                self._failed()
                self._allowed = np.ones(self._vocab_size, np.bool_)
            self._spent(time.thread_time() - began - _MASK_S)
        return self._allowed

    def took(self, token: int) -> None:
        """See `worker.sampling.sampler.Constraint`."""
        self._allowed = None
        if not self.error:
            began = time.thread_time()
            if not self._matcher.consume_token(token):
                self._failed()
            self._spent(time.thread_time() - began)

    def begin(self, resumed: list[int]) -> None:
        """Takes tokens generated elsewhere and computes the first mask. Called off the engine's thread, so it does not
        count against the budget."""
        for token in resumed:
            self.took(token)
            self._left_s = _MASKS_S
        self.allowed()
        self._left_s = _MASKS_S

    def _failed(self) -> None:
        self.error = self.error or reason(self._matcher) or "nothing can follow"

    def _spent(self, seconds: float) -> None:
        """Subtracts `seconds` from the budget; negative values refill it."""
        self._left_s = min(self._left_s - seconds, _MASKS_S)
        if self._left_s < 0:
            self.error = self.error or "its grammar takes too long at each token; use simpler patterns"


class GrammarCompiler:
    """Compiles grammars for one model, in this process. Any thread."""

    def __init__(self, codec: TextCodec, vocab_size: int, eos_ids: set[int]) -> None:
        """vocab_size: the model's, which may be larger than the tokenizer's."""
        self._codec, self._vocab_size, self._eos_ids = codec, vocab_size, sorted(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def spellings(self) -> Spellings:
        """The vocabulary in the library's form. It requires an end-of-text token; if the model has none, an extra id is
        used."""
        codec, vocab_size = self._codec, self._vocab_size
        tokens = [*(codec.spelling(token) for token in range(vocab_size)), b"<end>"]
        ends = [token for token in self._eos_ids if 0 <= token < vocab_size] or [vocab_size]
        special = sorted({vocab_size, *ends, *(token for token in codec.special_ids if token < vocab_size)})
        return Spellings(tokens, special, ends)

    def matcher(self, grammar: str, param: str) -> LLMatcher:
        """The compiled grammar in its initial state; use copies. Raises InvalidRequest with the library's reason."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tables(self.spellings(), self._codec.plain_tokens)
        matcher = compiled(self._tokenizer, grammar)
        if matcher.is_error():
            raise unsupported(param, reason(matcher))
        return matcher

    def spec(self, request: GenerateRequest) -> GrammarSpec | None:
        """The request's grammar; None: it has none. Raises InvalidRequest for grammars refused without compiling."""
        return spec_of(request, self._codec.dialect)

    def guide(self, request: GenerateRequest, matcher: LLMatcher) -> Guide:
        """The request's constraint, after its resumed tokens and with its first mask, and the reader of its calls."""
        constraint = GrammarConstraint(matcher.deep_copy(), self._vocab_size)
        constraint.begin(request.resume_tokens)
        use = request.tool_use
        if use is None or use.choice == "none":
            return Guide(constraint, None)
        answer = f"{request.group or request.request_id} {request.choice}"
        return Guide(constraint, CallReader(self._codec.dialect, answer, forced=use.choice == "required"))


@dataclass(frozen=True, slots=True)
class _Refused:
    """A cached refusal."""

    param: str
    reason: str


class Grammars:
    """Makes the guides of a worker's requests. One event loop, which it never blocks."""

    def __init__(self, compiler: GrammarCompiler, settings: WorkerSection) -> None:
        self.compiler = compiler
        self._seconds, self._processes = settings.grammar_s, settings.grammar_processes
        self._known: GrammarCache[LLMatcher | _Refused] = GrammarCache(_KEPT_BYTES, _TENANT_SHARE)
        #: Running compilations by tenant and digest, so that equal concurrent grammars are compiled once.
        self._learning: dict[tuple[str, bytes], asyncio.Task[LLMatcher | _Refused]] = {}
        self._children: Children | None = None
        self._starting = asyncio.Lock()
        # Grammars compiled here have passed in a helper, so they take bounded time. Lower priority than the engine's.
        self._pool = ThreadPoolExecutor(
            2, thread_name_prefix="grammar", initializer=niceness.step_back, initargs=(niceness.GRAMMAR,)
        )

    async def guide(self, request: GenerateRequest) -> Guide | None:
        """The guide of a request; None: it has no grammar. Raises InvalidRequest naming the field with an unsupported
        schema, RateLimited when too many of the tenant's grammars wait, Unavailable when the machine is too busy."""
        spec = self.compiler.spec(request)
        if spec is None:
            return None
        known = await self._look_up(request.tenant, spec)
        if isinstance(known, _Refused):
            _OUTCOMES.labels("refused").inc()
            raise unsupported(known.param, known.reason)
        guide = await asyncio.get_running_loop().run_in_executor(self._pool, self.compiler.guide, request, known)
        if guide.constraint.error:
            raise not_kept(spec.param, guide.constraint.error)
        return guide

    async def close(self) -> None:
        """Ends processes and threads."""
        for task in self._learning.values():
            task.cancel()
        if self._children is not None:
            await self._children.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, tenant: str, spec: GrammarSpec) -> LLMatcher | _Refused:
        packed = spec.packed()
        key = (tenant, blake3(packed).digest())
        known = self._known.get(*key, time.monotonic())
        if known is not None:
            _OUTCOMES.labels("known").inc()
            return known
        task = self._learning.get(key)
        if task is None:
            task = self._learning[key] = asyncio.ensure_future(self._learn(*key, spec, packed))
            task.add_done_callback(lambda done: self._learned(key, done))
        return await asyncio.shield(task)  # other requests may wait for it too

    def _learned(self, key: tuple[str, bytes], task: asyncio.Task[LLMatcher | _Refused]) -> None:
        del self._learning[key]
        if not task.cancelled():
            task.exception()  # marks it as retrieved, in case no request waits any more

    async def _learn(self, tenant: str, digest: bytes, spec: GrammarSpec, packed: bytes) -> LLMatcher | _Refused:
        try:
            children = await self._started()
            answer = read_answer(await children.call(tenant, packed, _BUSY_S, _WAIT_S))
        except ChildrenBusy as e:
            _OUTCOMES.labels("busy").inc()
            raise RateLimited(f"too many new schemas at a time: {e}. Try again", param=spec.param) from e
        except (ChildTimeout, ChildCannotStart) as e:
            _OUTCOMES.labels("busy").inc()
            raise Unavailable(
                f"{spec.param} could not be compiled now: {e}", param=spec.param, code="overloaded"
            ) from e
        except ChildDied as e:
            _OUTCOMES.labels("killed").inc()
            took_long = e.status == -signal.SIGPROF
            why = (
                too_long(self._seconds)
                if took_long
                else "its grammar takes too much memory to compile, or is nested too deep"
            )
            refused = _Refused(spec.param, why)
            self._known.put(
                tenant, digest, refused, _REFUSAL_BYTES, time.monotonic() + (_REFUSED_S if took_long else _DIED_S)
            )
            return refused
        if answer[0] is None:
            refused = _Refused(*answer[1:])
            self._known.put(tenant, digest, refused, _REFUSAL_BYTES)
            return refused
        grammar, bytes_ = answer
        compile_ = self.compiler.matcher
        matcher = await asyncio.get_running_loop().run_in_executor(self._pool, compile_, grammar, spec.param)
        _OUTCOMES.labels("compiled").inc()
        self._known.put(tenant, digest, matcher, bytes_ + _ENTRY_BYTES)
        return matcher

    async def _started(self) -> Children:
        async with self._starting:
            if self._children is None:
                loop = asyncio.get_running_loop()
                spellings = await loop.run_in_executor(self._pool, lambda: self.compiler.spellings().packed())
                self._children = Children(
                    [sys.executable, "-m", "worker.sampling.grammar_child"],
                    count=self._processes,
                    memory_bytes=_CHILD_BYTES,
                    per_owner=_WAITING,
                    setup=SECONDS.pack(self._seconds) + spellings,
                    nice=niceness.GRAMMAR,
                )
            return self._children
