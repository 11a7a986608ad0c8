"""Decides what is sent to a worker next: small commands in order, many to a message, and between them parts of large
submits in turns.

A message has at most `PART_BYTES` of small commands and one part of a large submit, so nothing waits behind a large
prompt for longer than one part. Large submits are sent concurrently up to the worker's limit for incomplete ones
(`MAX_SUBMIT_BYTES`); others wait unencoded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from contracts import frames
from contracts.errors import InvalidRequest
from contracts.request import GenerateRequest


@dataclass(slots=True)
class Message:
    """commands: of one message; empty: nothing to send. sent: ids of the requests that are complete with it. refused:
    ids of requests that cannot be encoded, with the error."""

    commands: list[bytes] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    refused: list[tuple[str, InvalidRequest]] = field(default_factory=list)


class Outbox:
    """Commands for one worker. Invariant: the incomplete submits have at most `window_bytes`, or there is only one."""

    def __init__(self, window_bytes: int = frames.MAX_SUBMIT_BYTES) -> None:
        self._window = window_bytes
        self._small: deque[GenerateRequest | str] = deque()
        #: Incomplete large submits, the next one first: the body, and the bytes of it already sent.
        self._parted: dict[str, tuple[bytes, int]] = {}
        #: Waiting large submits, with the size of their bodies.
        self._large: deque[tuple[GenerateRequest, int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._small or self._parted or self._large)

    def submit(self, request: GenerateRequest) -> None:
        """Start a request."""
        self._small.append(request)

    def cancel(self, request_id: str) -> None:
        """Cancel a request; parts not yet sent are dropped."""
        self._small.append(request_id)

    def next(self) -> Message:
        """Remove and return the next message."""
        message, size = Message(), 0
        while self._small and size < frames.PART_BYTES and len(message.commands) < frames.MOST_COMMANDS - 1:
            entry = self._small.popleft()
            if isinstance(entry, str):
                self._parted.pop(entry, None)
                self._large = deque(waiting for waiting in self._large if waiting[0].request_id != entry)
                message.commands.append(frames.encode_cancel(entry))
            elif (body := _body(entry, message)) is None:
                continue
            elif len(body) <= frames.PART_BYTES:
                message.commands.append(frames.submit_command(entry.request_id, body))
                message.sent.append(entry.request_id)
            elif not self._large and self._fits(len(body)):
                self._parted[entry.request_id] = body, 0
            else:
                self._large.append((entry, len(body)))
            size += len(message.commands[-1]) if message.commands else 0
        while self._large and self._fits(self._large[0][1]):
            request, _ = self._large.popleft()
            if (body := _body(request, message)) is not None:
                self._parted[request.request_id] = body, 0
        self._part(message)
        return message

    def _part(self, message: Message) -> None:
        if not self._parted:
            return
        request_id = next(iter(self._parted))
        body, at = self._parted.pop(request_id)
        end = at + frames.PART_BYTES
        message.commands.append(frames.encode_part(request_id, body[at:end], end >= len(body)))
        if end < len(body):
            self._parted[request_id] = body, end
        else:
            message.sent.append(request_id)

    def _fits(self, size: int) -> bool:
        return not self._parted or sum(len(body) for body, _ in self._parted.values()) + size <= self._window

    def validate(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        assert len(self._parted) <= 1 or sum(len(body) for body, _ in self._parted.values()) <= self._window
        assert all(0 <= at < len(body) for body, at in self._parted.values())


def _body(request: GenerateRequest, message: Message) -> bytes | None:
    try:
        return frames.encode_request(request)
    except InvalidRequest as e:
        message.refused.append((request.request_id, e))
        return None
