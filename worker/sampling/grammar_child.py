"""Compiles grammars in a helper process, before the worker does. The worker refuses a grammar that ends this process.

A grammar that loops, takes too much memory or overflows the stack (such as a long chain of `$ref`) ends this process
instead of the worker. A grammar that compiles here within the limits, with its first mask, is safe for the worker.
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
from worker.core.grammar_spec import GrammarSpec, answer_of, refusal_of, unpacked
from worker.sampling.vocabulary import compiled, reason, tables
from worker.sampling.vocabulary import unpacked as spellings

#: The setup begins with the limit of processor time per grammar, in seconds.
SECONDS = struct.Struct("<d")
#: An eighth of the usual stack of the worker's threads, so that a grammar that fits here fits there.
_STACK_BYTES = 1 << 20
#: Memory limit of a compiled grammar.
_MOST_BYTES = 64 << 20


class _Mallinfo2(ctypes.Structure):
    """glibc's mallinfo2: `used` bytes are in small blocks, `mapped` bytes in large ones."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "free_blocks",
            "fast_blocks",
            "maps",
            "mapped",
            "_",
            "fast_bytes",
            "used",
            "free_bytes",
            "top",
        )
    ]


class _Compiler:
    """Compiles grammars for the vocabulary that the parent sends."""

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
        """The answer to one spec. Beyond the time limit SIGPROF ends the process, as the library cannot be
        interrupted."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        spec = unpacked(packed)
        try:
            return self._judge(spec)
        except RecursionError:
            return refusal_of(spec.param, "it is nested too deep")
        except UnicodeError:
            return refusal_of(spec.param, "it has characters that no text has")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _judge(self, spec: GrammarSpec) -> bytes:
        began, before = time.process_time(), self._used_bytes()
        grammar = spec.grammar()
        why, kept = self._tried(grammar)
        if why:
            for param, part in spec.parts():
                if because := self._tried(part)[0]:
                    return refusal_of(param, because)
            return refusal_of(spec.param, why)
        bytes_ = max(self._used_bytes() - before, len(grammar))
        if bytes_ > _MOST_BYTES:
            return refusal_of(
                spec.param, f"its grammar takes {bytes_ >> 20} MiB of memory, and at most {_MOST_BYTES >> 20} are given"
            )
        del kept
        if time.process_time() - began > self._seconds:
            return refusal_of(spec.param, too_long(self._seconds))
        return answer_of(grammar, bytes_)

    def _tried(self, grammar: str) -> tuple[str, LLMatcher]:
        """Compiles the grammar and its first mask. Returns why it cannot be used (empty: it can), and the matcher."""
        assert self._tokenizer is not None
        matcher = compiled(self._tokenizer, grammar)
        if not matcher.is_error():
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and not any(mask):
                return "no answer satisfies it", matcher
        why = reason(matcher)
        return "no answer satisfies it" if why == "NoExtensionBias" else why, matcher

    def _used_bytes(self) -> int:
        """Bytes of memory in use; 0 without glibc's mallinfo2."""
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.used + info.mapped)


def too_long(seconds: float) -> str:
    """The reason of a refusal for time."""
    return (
        f"its grammar takes more than {seconds:g} s to compile; use fewer or simpler patterns, combinations and counts"
    )


if __name__ == "__main__":
    compiler = _Compiler()
    serve(compiler.handle, compiler.begin)
