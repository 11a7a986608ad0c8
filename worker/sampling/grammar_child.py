"""Compiles grammars in a process of its own, before the worker does: what ends this one is refused there.

A grammar that loops, takes too much memory or overflows the stack (a long chain of `$ref` does) ends this process, not the worker.
What is left is a grammar that compiles, with its first mask, within the limits, so that the worker can do the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import signal
import struct
import time

from llguidance import LLMatcher, LLTokenizer

from runtime.child import serve
from worker.core.grammar_wish import Wish, answer_of, refusal_of, unpacked
from worker.sampling.vocabulary import compiled, reason, tables
from worker.sampling.vocabulary import unpacked as spellings

#: The setup begins with the processor time that one grammar may take, in seconds.
SECONDS = struct.Struct("<d")
#: An eighth of what the worker's threads usually have: what fits here fits there.
_STACK_BYTES = 1 << 20
#: What a grammar may keep, once compiled.
_MOST_BYTES = 64 << 20


class _Mallinfo2(ctypes.Structure):
    """glibc's; `used` bytes are in small blocks, `mapped` in large ones."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "free_blocks", "fast_blocks", "maps", "mapped", "_", "fast_bytes", "used", "free_bytes", "top")
    ]


class _Compiler:
    """The tables of the vocabulary, once the parent has told it."""

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._seconds = 0.0
        self._mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc's
        if self._mallinfo is not None:
            self._mallinfo.restype = _Mallinfo2

    def begin(self, setup: bytes) -> None:
        """See `runtime.child.serve`."""
        (self._seconds,) = SECONDS.unpack_from(setup)
        self._tokenizer = tables(spellings(setup[SECONDS.size :]))
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))

    def handle(self, packed: bytes) -> bytes:
        """The answer to one wish. Past its processor time, SIGPROF ends the process: nothing within the library can be interrupted."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        wish = unpacked(packed)
        try:
            return self._judge(wish)
        except RecursionError:
            return refusal_of(wish.param, "it is nested too deep")
        except UnicodeError:
            return refusal_of(wish.param, "it has characters that no text has")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _judge(self, wish: Wish) -> bytes:
        began, before = time.process_time(), self._used_bytes()
        grammar = wish.grammar()
        why, kept = self._tried(grammar)
        if why:
            for param, part in wish.parts():
                if because := self._tried(part)[0]:
                    return refusal_of(param, because)
            return refusal_of(wish.param, why)
        bytes_ = max(self._used_bytes() - before, len(grammar))
        if bytes_ > _MOST_BYTES:
            return refusal_of(wish.param, f"its grammar takes {bytes_ >> 20} MiB of memory, and at most {_MOST_BYTES >> 20} are given")
        del kept
        if time.process_time() - began > self._seconds:
            return refusal_of(wish.param, too_long(self._seconds))
        return answer_of(grammar, bytes_)

    def _tried(self, grammar: str) -> tuple[str, LLMatcher]:
        """Why the grammar cannot be used, and what was made of it, its first mask included."""
        assert self._tokenizer is not None
        matcher = compiled(self._tokenizer, grammar)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and not any(mask):
                return "no answer satisfies it", matcher
        why = reason(matcher)
        return "no answer satisfies it" if why == "NoExtensionBias" else why, matcher

    def _used_bytes(self) -> int:
        """Memory in use; 0 where the C library does not tell."""
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.used + info.mapped)


def too_long(seconds: float) -> str:
    """The reason of a refusal for its time."""
    return f"its grammar takes more than {seconds:g} s to compile; use fewer or simpler patterns, combinations and counts"


if __name__ == "__main__":
    compiler = _Compiler()
    serve(compiler.handle, compiler.begin)
