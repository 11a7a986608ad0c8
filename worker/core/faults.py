"""What fails one request and nobody else's: how it is told, and whose fault a step that raised was."""

from __future__ import annotations

from contracts.errors import InvalidRequest, RequestError

CODE = "generation_failed"


class NoFiniteLogits(InvalidRequest):
    """The model's own numbers for this request are not finite: what its KV holds cannot be trusted."""

    def __init__(self) -> None:
        super().__init__("the model gave no finite number for any next token of this prompt", code=CODE)


def told(part: str, error: BaseException) -> RequestError:
    """What the caller of a request reads on which `part` of the engine raised `error`."""
    if isinstance(error, RequestError):
        return error
    return InvalidRequest(f"the answer could not be generated: {part} failed on this request ({type(error).__name__})", code=CODE)
