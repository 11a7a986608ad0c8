"""The token stream's msgpack frames: one a message, and from the worker one an engine step.

To the worker: `{"submit": {...GenerateRequest}}`, `{"cancel": request_id}`.
From the worker: `{"accepted": [...], "outputs": [...], "failed": [...]}`, each a list of field lists in declaration
order. Lengths are bounded before anything is built (`MAX_FRAME_BYTES`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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


def encode_submit(request: GenerateRequest) -> bytes:
    """The frame that starts a request."""
    return _pack({"submit": asdict(request)})


def encode_cancel(request_id: str) -> bytes:
    """The frame that ends a request whose client went away."""
    return _pack({"cancel": request_id})


def decode_to_worker(frame: bytes) -> GenerateRequest | str:
    """A request to start, or the id of one to cancel. Raises ValueError on anything else."""
    data = _unpack(frame)
    if isinstance(data.get("cancel"), str):
        return str(data["cancel"])
    if isinstance(data.get("submit"), dict):
        fields = data["submit"]
        sampling = Sampling(**fields.pop("sampling"))
        use = fields.pop("tool_use", None)
        return GenerateRequest(sampling=sampling, tool_use=None if use is None else ToolUse(**use), **fields)
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


def decode_step(frame: bytes) -> StepFrame:
    """The inverse of `encode_step`."""
    data = _unpack(frame)
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


def _unpack(frame: bytes) -> dict[str, Any]:
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    data = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    if not isinstance(data, dict):
        raise ValueError("a frame is a msgpack map")
    return data
