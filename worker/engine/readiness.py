"""Prepares a request for the engine, off the engine's thread: work that grows with the prompt or the stop strings.

`Ready` holds all that a request needs for its next token and shares nothing with other requests, so an exception fails
only that request.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.request import GenerateRequest, Output
from worker.core.sequence import NO_ADAPTER, Adapter, Sequence
from worker.core.token_counts import Row
from worker.engine.executor import Executor
from worker.sampling.output import Guide, Writer
from worker.sampling.sampler import SamplingState, choose
from worker.text.codec import TextCodec


@dataclass(slots=True)
class Ready:
    """A request's sequence (`arrival` not set yet), sampling state and output text. After `make_ready`, only the
    engine's thread uses it."""

    sequence: Sequence
    sampling: SamplingState
    writer: Writer

    def next_output(self, row: Row) -> Output:
        """Choose the next token from logits (float32 `[vocab]`) and return the client's output. Raises InvalidRequest
        if no token can be chosen or the grammar cannot continue."""
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
    adapter: Adapter = NO_ADAPTER,
) -> Ready:
    """Prepare a request. Any thread. guide: its grammar, after `resume_tokens`. ends: end-of-text tokens. Raises
    InvalidRequest."""
    tokens = prompt + request.resume_tokens
    sequence = Sequence(request, len(prompt), tokens, max_tokens, arrival=0, adapter=adapter)
    if executor.settings.cache:
        chunks = len(sequence.tokens) // executor.shape.chunk_tokens
        sequence.extend_keys(executor.salt_of(request.tenant), executor.shape, chunks)
    constraint = guide.constraint if guide else None
    sampling = SamplingState.start(request.sampling, prompt, request.resume_tokens, ends, constraint)
    return Ready(sequence, sampling, Writer(sequence, codec, set(ends), guide))
