"""The token stream's msgpack frames: one a message, and from the worker one an engine step.

To the worker: `{"submit": {...GenerateRequest}}`, `{"cancel": request_id}`, or a list of such; what has its default value is left out.
From the worker: `{"accepted": [...], "outputs": [...], "failed": [...]}`, each a list of field lists in declaration
order. Lengths are bounded before anything is built (`MAX_FRAME_BYTES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import msgpack

from contracts.request import Accepted, Failed, GenerateRequest, Output, Sampling, TokenLogprob, ToolCallDelta, ToolUse

MAX_FRAME_BYTES = 64 << 20


@dataclass(slots=True)
class StepFrame:
    """Everything that one engine step has for one gateway."""

    accepted: list[Accepted] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.accepted or self.outputs or self.failed)


def _defaults(kind: type[Any]) -> list[tuple[str, Any]]:
    """The fields and what is left out; `...` where a field is always there."""
    made = []
    for f in fields(kind):
        factory: Callable[[], Any] | Any = f.default_factory
        made.append((f.name, factory() if factory is not MISSING else f.default if f.default is not MISSING else ...))
    return made


_REQUEST, _SAMPLING, _TOOL_USE = _defaults(GenerateRequest), _defaults(Sampling), _defaults(ToolUse)


def _changed(value: Any, defaults: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: given for name, default in defaults if (given := getattr(value, name)) is not default and given != default}


def encode_submit(request: GenerateRequest) -> bytes:
    """The frame that starts a request."""
    submit = _changed(request, _REQUEST)
    submit["sampling"] = _changed(request.sampling, _SAMPLING)
    if request.tool_use is not None:
        submit["tool_use"] = _changed(request.tool_use, _TOOL_USE)
    return _pack({"submit": submit})


def encode_cancel(request_id: str) -> bytes:
    """The frame that ends a request whose client went away."""
    return _pack({"cancel": request_id})


def together(commands: Sequence[bytes]) -> bytes:
    """One frame of several: at most 15."""
    return commands[0] if len(commands) == 1 else bytes((0x90 | len(commands),)) + b"".join(commands)


#: Of a frame to the worker.
MOST_COMMANDS = 15


def decode_to_worker(frame: bytes) -> list[GenerateRequest | str]:
    """Requests to start and ids of requests to cancel, in order. Raises ValueError on anything else."""
    data = _unpack(frame)
    return [_command(one) for one in data] if isinstance(data, list) and data else [_command(data)]


def _command(data: Any) -> GenerateRequest | str:
    if isinstance(data, dict) and isinstance(data.get("cancel"), str):
        return str(data["cancel"])
    if isinstance(data, dict) and isinstance(data.get("submit"), dict):
        submit = data["submit"]
        if not isinstance(submit.get("request_id"), str):
            raise ValueError("a request's id is a string")
        sampling = Sampling(**submit.pop("sampling"))
        use = submit.pop("tool_use", None)
        return GenerateRequest(sampling=sampling, tool_use=None if use is None else ToolUse(**use), **submit)
    raise ValueError("a frame to a worker holds submit or cancel")


def encode_step(frame: StepFrame) -> bytes:
    """The frame of one engine step."""
    return _pack(
        {
            "accepted": [[a.request_id, a.prompt_tokens] for a in frame.accepted],
            "outputs": [_output(o) for o in frame.outputs],
            "failed": [[f.request_id, f.error] for f in frame.failed],
        }
    )


#: Steps of one frame.
MOST_STEPS = 32


def joined(steps: Sequence[StepFrame]) -> StepFrame:
    """One frame of several, the oldest first, when a stream is slower than its engine: each message costs both ends more than what is in
    it. A request's events keep their order: it is accepted first, and fails last."""
    if len(steps) == 1:
        return steps[0]
    return StepFrame(
        [a for step in steps for a in step.accepted],
        [o for step in steps for o in step.outputs],
        [f for step in steps for f in step.failed],
    )


def decode_step(frame: bytes) -> StepFrame:
    """The inverse of `encode_step`."""
    data = _unpack(frame)
    if not isinstance(data, dict):
        raise ValueError("a step's frame is a msgpack map")
    return StepFrame(
        accepted=[Accepted(*a) for a in data["accepted"]],
        outputs=[_from_output(*fields) for fields in data["outputs"]],
        failed=[Failed(*f) for f in data["failed"]],
    )


def _output(o: Output) -> list[Any]:
    calls = None if o.tool_calls is None else [[c.index, c.id, c.name, c.arguments] for c in o.tool_calls]
    return [o.request_id, o.text, o.tokens, o.cached_tokens, _logprobs(o.logprobs), o.finish_reason, calls]


def _from_output(
    request_id: str, text: str, tokens: list[int], cached: int, logprobs: list[Any] | None, end: Any, calls: list[Any] | None
) -> Output:
    called = None if calls is None else [ToolCallDelta(*c) for c in calls]
    return Output(request_id, text, tokens, cached, _from_logprobs(logprobs), end, called)


def _logprobs(values: list[TokenLogprob] | None) -> list[Any] | None:
    return None if values is None else [[v.token, v.logprob, v.top] for v in values]


def _from_logprobs(values: list[Any] | None) -> list[TokenLogprob] | None:
    return None if values is None else [TokenLogprob(token, p, [tuple(t) for t in top]) for token, p, top in values]


def _pack(data: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(data, use_bin_type=True)
    return packed


def _unpack(frame: bytes) -> Any:
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return msgpack.unpackb(frame, raw=False, strict_map_key=False)
