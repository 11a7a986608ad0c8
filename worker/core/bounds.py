"""Validates requests before they reach the engine: types and ranges (`contracts.ranges`).

The gateway has checked all of this. The worker checks again, because a field of the wrong type would raise on the
engine thread, which all requests share. `worker.service.server` checks the prompt's token ids against the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from contracts import ranges
from contracts.errors import InvalidRequest
from contracts.ids import check_session_id
from contracts.request import GenerateRequest, Sampling
from contracts.template_kwargs import decode_template_kwargs

_MOST = ranges.MOST_TOKENS
#: Integer fields of Sampling, with their ranges.
_WHOLE: Mapping[str, tuple[int, int]] = {"top_k": (0, _MOST), "min_tokens": (0, _MOST)}
_WHOLE_OR_NONE: Mapping[str, tuple[int, int]] = {
    "seed": ranges.SEED,
    "max_tokens": (1, _MOST),
    "logprobs": (0, ranges.MAX_TOP_LOGPROBS),
}
_REAL: Mapping[str, tuple[float, float]] = {
    "temperature": ranges.TEMPERATURE,
    "top_p": ranges.UNIT,
    "min_p": ranges.UNIT,
    "presence_penalty": ranges.PENALTY,
    "frequency_penalty": ranges.PENALTY,
    "repetition_penalty": ranges.REPETITION_PENALTY,
}
_MAX_NAME_CHARS = 512
_MAX_NODES = 1024


def check_request(request: GenerateRequest) -> None:
    """Raises InvalidRequest naming the first field of the wrong type or out of range."""
    _check_names(request)
    _check_whole("priority", request.priority, ranges.PRIORITY)
    _check_real("weight", request.weight, ranges.WEIGHT)
    _check_whole("kept_tokens", request.kept_tokens, (0, _MOST))
    _check_whole("choice", request.choice, (0, _MOST))
    if request.expected_tokens is not None:
        _check_whole("expected_tokens", request.expected_tokens, (0, _MOST))
    _check_tokens("resume_tokens", request.resume_tokens)
    decode_template_kwargs(request.template_kwargs)
    check_sampling(request.sampling)


def check_sampling(s: Sampling) -> None:
    """Like `check_request`, for the sampling fields."""
    for name, bounds in _WHOLE.items():
        _check_whole(name, getattr(s, name), bounds)
    for name, bounds in _WHOLE_OR_NONE.items():
        if getattr(s, name) is not None:
            _check_whole(name, getattr(s, name), bounds)
    for name, real in _REAL.items():
        _check_real(name, getattr(s, name), real)
    for name in ("ignore_eos", "include_stop", "skip_special_tokens"):
        if not isinstance(getattr(s, name), bool):
            raise _invalid(name, "must be true or false")
    if not _is_list_of(s.stop, str, ranges.MAX_STOPS) or any(len(text) > ranges.MAX_STOP_CHARS for text in s.stop):
        raise _invalid(
            "stop", f"must be at most {ranges.MAX_STOPS} strings of at most {ranges.MAX_STOP_CHARS} characters"
        )
    if len(s.stop_token_ids) > ranges.MAX_STOP_TOKENS:
        raise _invalid("stop_token_ids", f"must hold at most {ranges.MAX_STOP_TOKENS} token ids")
    _check_tokens("stop_token_ids", s.stop_token_ids)
    if not isinstance(s.logit_bias, dict) or len(s.logit_bias) > ranges.MAX_BIASES:
        raise _invalid("logit_bias", f"must hold at most {ranges.MAX_BIASES} token ids with their biases")
    _check_tokens("logit_bias", list(s.logit_bias))
    for bias in s.logit_bias.values():
        _check_real("logit_bias", bias, ranges.BIAS)


def _check_names(request: GenerateRequest) -> None:
    for name in ("request_id", "tenant", "model", "group", "form_field"):
        value = getattr(request, name)
        if not isinstance(value, str) or len(value) > _MAX_NAME_CHARS:
            raise _invalid(name, f"must be a string of at most {_MAX_NAME_CHARS} characters")
    check_session_id(request.session_id)
    if not _is_list_of(request.source_nodes, str, _MAX_NODES):
        raise _invalid("source_nodes", f"must be at most {_MAX_NODES} names")


def _is_list_of(value: Any, kind: type, most: int) -> bool:
    return isinstance(value, list) and len(value) <= most and all(isinstance(one, kind) for one in value)


def _check_tokens(name: str, value: Any) -> None:
    if not isinstance(value, list) or any(type(token) is not int or not 0 <= token < 1 << 31 for token in value):
        raise _invalid(name, "must hold token ids")


def _check_whole(name: str, value: Any, bounds: tuple[int, int]) -> None:
    if type(value) is not int or not bounds[0] <= value <= bounds[1]:
        raise _invalid(name, f"must be a whole number from {bounds[0]} to {bounds[1]}")


def _check_real(name: str, value: Any, bounds: tuple[float, float]) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or not bounds[0] <= value <= bounds[1]:
        raise _invalid(name, f"must be a number from {bounds[0]:g} to {bounds[1]:g}")


def _invalid(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {what}", param=name)
