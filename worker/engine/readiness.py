"""A request made ready for the engine, off the engine's thread: what takes long for a long prompt or many stop strings is done here.

What a request needs for its next token lies in `Ready`, which touches nothing that requests share: what it raises fails that request only.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.kv import chunk_keys
from contracts.request import GenerateRequest, Output
from worker.core.sequence import Sequence
from worker.core.token_counts import Row
from worker.engine.executor import Executor
from worker.sampling.output import Guide, Writer
from worker.sampling.sampler import SamplingState, choose
from worker.text.codec import TextCodec


@dataclass(slots=True)
class Ready:
    """A request's sequence (its place among others is not known yet), its sampling, and its text. The engine's thread only, once made."""

    sequence: Sequence
    sampling: SamplingState
    writer: Writer

    def next_output(self, row: Row) -> Output:
        """Choose the next token from its logits (float32 `[vocab]`), and say what the client gains. Raises InvalidRequest when
        no token can be chosen or its grammar cannot go on."""
        choice = choose(row, self.sampling)
        self.sampling.took(choice.token)
        if (error := self.writer.error) is not None:
            raise error
        return self.writer.take(choice)


def make_ready(
    request: GenerateRequest,
    prompt: list[int],
    max_tokens: int,
    guide: Guide | None,
    executor: Executor,
    codec: TextCodec,
    ends: frozenset[int],
) -> Ready:
    """Any thread. guide: its grammar, after `resume_tokens`. ends: tokens that end a text. Raises InvalidRequest."""
    sequence = Sequence(request, len(prompt), prompt + request.resume_tokens, max_tokens, arrival=0)
    if executor.settings.cache:
        sequence.keys = chunk_keys(executor.salt_of(request.tenant), executor.shape, sequence.tokens)
    constraint = guide.constraint if guide else None
    sampling = SamplingState.start(request.sampling, prompt, request.resume_tokens, ends, constraint)
    return Ready(sequence, sampling, Writer(sequence, codec, set(ends), guide))
