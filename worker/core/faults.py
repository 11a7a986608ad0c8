"""Errors that fail a single request, as its caller sees them."""

from __future__ import annotations

from contracts.errors import InvalidRequest, RequestError

CODE = "generation_failed"


class NoFiniteLogits(InvalidRequest):
    """The logits of this request are not finite, so its KV cannot be trusted."""

    def __init__(self) -> None:
        super().__init__("the model gave no finite number for any next token of this prompt", code=CODE)


def told(part: str, error: BaseException) -> RequestError:
    """The caller's error for a request on which `part` of the engine raised `error`."""
    if isinstance(error, RequestError):
        return error
    return InvalidRequest(
        f"the answer could not be generated: {part} failed on this request ({type(error).__name__})", code=CODE
    )
