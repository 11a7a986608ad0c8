"""The token stream's msgpack frames, one gRPC message each. Sizes are checked before decoding, and an unreadable part
of a frame fails only its request.

To the worker: an array of commands.

- `[request_id, "submit", {...GenerateRequest} as bytes]`; fields with default values are left out.
- `[request_id, "part", bytes, is_last]`: a piece of a large submit, so that small commands can pass between pieces.
- `[request_id, "cancel"]`

From the worker: one step or an array of steps, each `{"accepted": [...], "outputs": [...], "failed": [...]}`, lists of
field lists in declaration order, plus optional keys (`encode_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

import msgpack

from contracts.errors import InvalidRequest, to_wire
from contracts.request import Accepted, Failed, GenerateRequest, Output, Sampling, TokenLogprob, ToolCallDelta, ToolUse

#: Limit of one submit, of all incomplete submits of a stream, and of any frame.
MAX_SUBMIT_BYTES = 64 << 20
#: Larger submits are sent in parts of this size. Also the limit of commands in one message.
PART_BYTES = 256 << 10
#: Commands of one message.
MOST_COMMANDS = 512
#: Limits of one message of steps: their number and bytes.
MOST_STEPS, STEPS_BYTES = 32, 1 << 20
#: Limit of one event of a step. A larger event fails its request.
MAX_EVENT_BYTES = 16 << 20


@dataclass(slots=True)
class StepFrame:
    """The results of one engine step for one gateway.

    trial: id of the `alone` request that the engine computes exclusively from now on; empty: none; None: unchanged.
    leaving: the worker shuts down in order, so a break of the stream afterwards is no engine failure.
    """

    accepted: list[Accepted] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    trial: str | None = None
    leaving: bool = False

    def __bool__(self) -> bool:
        return bool(self.accepted or self.outputs or self.failed or self.trial is not None or self.leaving)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An unreadable submit; `error` is for its caller."""

    request_id: str
    error: InvalidRequest


Command = GenerateRequest | str | Unreadable
E = TypeVar("E")


def _defaults(kind: type[Any]) -> list[tuple[str, Any]]:
    """Fields with their defaults; `...` for required fields."""
    made = []
    for f in fields(kind):
        factory: Callable[[], Any] | Any = f.default_factory
        made.append((f.name, factory() if factory is not MISSING else f.default if f.default is not MISSING else ...))
    return made


_REQUEST, _SAMPLING, _TOOL_USE = _defaults(GenerateRequest), _defaults(Sampling), _defaults(ToolUse)


def _changed(value: Any, defaults: list[tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: given for name, default in defaults if (given := getattr(value, name)) is not default and given != default
    }


# ---- to the worker -------------------------------------------------------------------------------------------------
def encode_request(request: GenerateRequest) -> bytes:
    """The body of a submit. Raises InvalidRequest when the request cannot be encoded or is too large."""
    submit = _changed(request, _REQUEST)
    submit["sampling"] = _changed(request.sampling, _SAMPLING)
    if request.tool_use is not None:
        submit["tool_use"] = _changed(request.tool_use, _TOOL_USE)
    packed = submit.pop("packed", {})
    param = "messages" if request.messages is not None or "messages" in packed else "prompt"
    try:
        body = _pack(submit) if not packed else _with_packed(submit, packed)
    except (ValueError, TypeError, OverflowError) as e:
        raise InvalidRequest(f"the request cannot be sent to a worker: {e}", param=param) from None
    if len(body) > MAX_SUBMIT_BYTES:
        raise InvalidRequest(
            f"the request takes {len(body)} bytes on its way to a worker, which takes {MAX_SUBMIT_BYTES} at most; "
            "shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    return body


def _with_packed(submit: dict[str, Any], packed: dict[str, bytes]) -> bytes:
    packer = msgpack.Packer(use_bin_type=True)
    parts = [packer.pack_map_header(len(submit) + len(packed))]
    for name, value in submit.items():
        parts += [packer.pack(name), packer.pack(value)]
    for name, value in packed.items():
        parts += [packer.pack(name), value]
    return b"".join(parts)


def encode_submit(request: GenerateRequest) -> bytes:
    """The command that starts a request, in one piece. Raises as `encode_request`."""
    return submit_command(request.request_id, encode_request(request))


def submit_command(request_id: str, body: bytes) -> bytes:
    """Like `encode_submit`, for a body made by `encode_request`."""
    return _pack([request_id, "submit", body])


def encode_part(request_id: str, piece: bytes, last: bool) -> bytes:
    """The command that carries the next piece of a submit's body."""
    return _pack([request_id, "part", piece, last])


def encode_cancel(request_id: str) -> bytes:
    """The command that ends a request."""
    return _pack([request_id, "cancel"])


def together(parts: Sequence[bytes]) -> bytes:
    """One message of several encoded commands or steps."""
    return b"\xdc" + len(parts).to_bytes(2, "big") + b"".join(parts)


class Commands:
    """Decodes a worker's incoming stream and joins the parts of submits. Invariant: holds at most `most_bytes` of
    parts."""

    def __init__(self, most_bytes: int = MAX_SUBMIT_BYTES) -> None:
        self._most = most_bytes
        self._parts: dict[str, bytearray | None] = {}  #: None: refused; its remaining parts are skipped
        self.held_bytes = 0

    def take(self, frame: bytes) -> list[Command]:
        """Requests to start, ids of requests to cancel, and unreadable submits, in order. Raises ValueError when the
        message is no array of commands."""
        data = _unpack(frame)
        if not isinstance(data, list) or not all(
            isinstance(c, list) and len(c) >= 2 and isinstance(c[0], str) for c in data
        ):
            raise ValueError("a message to a worker is an array of commands")
        taken: list[Command] = []
        for request_id, kind, *rest in data:
            if kind == "cancel":
                self._drop(request_id)
                taken.append(request_id)
            elif kind == "submit" and len(rest) == 1:
                taken.append(_request(request_id, rest[0]))
            elif kind == "part" and len(rest) == 2 and isinstance(rest[0], bytes):
                taken += self._part(request_id, rest[0], bool(rest[1]))
            else:
                taken.append(_unreadable(request_id, "its command is none of submit, part and cancel"))
        return taken

    def _part(self, request_id: str, piece: bytes, last: bool) -> list[Command]:
        parts = self._parts.setdefault(request_id, bytearray())
        found: list[Command] = []
        if parts is not None and self.held_bytes + len(piece) > self._most:
            self._drop(request_id)
            parts = self._parts[request_id] = None
            found.append(
                _unreadable(request_id, f"more than {self._most} bytes of requests are on their way; try again")
            )
        if parts is not None:
            parts += piece
            self.held_bytes += len(piece)
        if last:
            self._drop(request_id)
            if parts is not None:
                found.append(_request(request_id, bytes(parts)))
        return found

    def _drop(self, request_id: str) -> None:
        self.held_bytes -= len(self._parts.pop(request_id, None) or b"")

    def validate(self) -> None:
        """Raise AssertionError when the invariant is broken."""
        assert self.held_bytes == sum(len(parts or b"") for parts in self._parts.values()) <= self._most


def _request(request_id: str, body: bytes) -> GenerateRequest | Unreadable:
    try:
        submit = _unpack(body)
        sampling = Sampling(**submit.pop("sampling"))
        use = submit.pop("tool_use", None)
        made = GenerateRequest(sampling=sampling, tool_use=None if use is None else ToolUse(**use), **submit)
        if made.request_id != request_id:
            raise ValueError("it names another request")
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        return _unreadable(request_id, str(e))
    return made


def _unreadable(request_id: str, why: str) -> Unreadable:
    return Unreadable(request_id, InvalidRequest(f"the worker cannot read this request: {why}"))


# ---- from the worker -----------------------------------------------------------------------------------------------
def encode_step(step: StepFrame) -> bytes:
    """One encoded step, of any size."""
    data: dict[str, Any] = {
        "accepted": [[a.request_id, a.prompt_tokens, *([True] if a.thinking else [])] for a in step.accepted],
        "outputs": [_output(o) for o in step.outputs],
        "failed": [[f.request_id, f.error] for f in step.failed],
    }
    # Separate keys: few outputs have these, and older gateways ignore them.
    if times := {o.request_id: o.times for o in step.outputs if o.times is not None}:
        data["times"] = times
    if stops := {o.request_id: o.stop for o in step.outputs if o.stop}:
        data["stops"] = stops
    if step.trial is not None:
        data["trial"] = step.trial
    if step.leaving:
        data["leaving"] = True
    return _pack(data, "replace")  # an error may quote a lone surrogate of the caller's text


def encode_steps(steps: Iterable[StepFrame]) -> list[bytes]:
    """Groups steps into messages of at most about STEPS_BYTES, in order; a single event may take more. An event over
    MAX_EVENT_BYTES fails its request instead."""
    messages: list[bytes] = []
    group: list[bytes] = []
    size = 0
    for step in steps:
        whole = _encoded(step)
        for piece in _pieces(step) if whole is None or len(whole) > STEPS_BYTES else [whole]:
            if group and size + len(piece) > STEPS_BYTES:
                messages.append(together(group))
                group, size = [], 0
            group.append(piece)
            size += len(piece)
    messages.append(group[0] if len(group) == 1 else together(group))
    return messages


def _pieces(step: StepFrame) -> list[bytes]:
    """The step encoded as one step per event, in order."""
    found = [encode_step(StepFrame(trial=step.trial, leaving=step.leaving))]
    events: list[Accepted | Output | Failed] = [*step.accepted, *step.outputs, *step.failed]
    for event in events:
        alone = StepFrame(
            [event] if isinstance(event, Accepted) else [],
            [event] if isinstance(event, Output) else [],
            [event] if isinstance(event, Failed) else [],
        )
        piece = _encoded(alone)
        if piece is None or len(piece) > MAX_EVENT_BYTES:
            error = InvalidRequest(
                f"the answer gained more than {MAX_EVENT_BYTES} bytes in one step, or what cannot be sent"
            )
            piece = encode_step(StepFrame(failed=[Failed(event.request_id, to_wire(error))]))
        found.append(piece)
    return found


def _encoded(step: StepFrame) -> bytes | None:
    try:
        return encode_step(step)
    except (ValueError, TypeError, OverflowError):
        return None


def decode_step(frame: bytes) -> StepFrame:
    """One StepFrame for the one or more steps of a message, oldest first. An unreadable event fails its request. Raises
    ValueError when the message holds no step."""
    data = _unpack(frame, "replace")
    steps = data if isinstance(data, list) else [data]
    if not all(isinstance(step, dict) for step in steps):
        raise ValueError("a step's frame is a msgpack map")
    found = StepFrame()
    for step in steps:
        unread: list[Any] = []
        try:
            outputs = [_from_output(*o) for o in step["outputs"]]
        except (ValueError, TypeError, KeyError):
            outputs = _events(step.get("outputs"), lambda o: _from_output(*o), unread)
        if isinstance(times := step.get("times"), dict):
            for output in outputs:
                output.times = times.get(output.request_id)
        if isinstance(stops := step.get("stops"), dict):
            for output in outputs:
                output.stop = str(stops.get(output.request_id) or "")
        found.outputs += outputs
        if accepted := step.get("accepted"):
            found.accepted += _events(accepted, lambda a: Accepted(*a), unread)
        if failed := step.get("failed"):
            found.failed += _events(failed, lambda f: Failed(*f), unread)
        for event in unread:
            if isinstance(event, list) and event and isinstance(event[0], str):
                error = InvalidRequest("the worker's answer to this request cannot be read")
                found.failed.append(Failed(event[0], to_wire(error)))
        trial = step.get("trial")
        found.trial = trial if isinstance(trial, str) else found.trial
        found.leaving = found.leaving or bool(step.get("leaving"))
    return found


def _events(given: Any, read: Callable[[Any], E], unread: list[Any]) -> list[E]:
    if not isinstance(given, list):
        return []
    found = []
    for event in given:
        try:
            found.append(read(event))
        except (ValueError, TypeError):
            unread.append(event)
    return found


def _output(o: Output) -> list[Any]:
    calls = None if o.tool_calls is None else [[c.index, c.id, c.name, c.arguments] for c in o.tool_calls]
    return [o.request_id, o.text, o.tokens, o.cached_tokens, _logprobs(o.logprobs), o.finish_reason, calls]


def _from_output(
    request_id: str,
    text: str,
    tokens: list[int],
    cached: int,
    logprobs: list[Any] | None,
    end: Any,
    calls: list[Any] | None,
) -> Output:
    called = None if calls is None else [ToolCallDelta(*c) for c in calls]
    return Output(request_id, text, tokens, cached, _from_logprobs(logprobs), end, called)


def _logprobs(values: list[TokenLogprob] | None) -> list[Any] | None:
    return None if values is None else [[v.token, v.logprob, v.top] for v in values]


def _from_logprobs(values: list[Any] | None) -> list[TokenLogprob] | None:
    return None if values is None else [TokenLogprob(token, p, [tuple(t) for t in top]) for token, p, top in values]


def _pack(data: Any, surrogates: str = "strict") -> bytes:
    packed: bytes = msgpack.packb(data, use_bin_type=True, unicode_errors=surrogates)
    return packed


def _unpack(frame: bytes, surrogates: str = "strict") -> Any:
    if len(frame) > MAX_SUBMIT_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes is over the limit of {MAX_SUBMIT_BYTES}")
    return msgpack.unpackb(frame, raw=False, strict_map_key=False, unicode_errors=surrogates)
