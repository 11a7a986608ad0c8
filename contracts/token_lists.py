"""Limits of `/tokenize` and `/detokenize`: number of token ids and bytes of their text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from contracts.errors import InvalidRequest

#: Ids of one list; a model's context may lower it.
MOST_TOKENS: Final = 1 << 20
#: UTF-8 bytes of one list's text or token spellings: half of a gRPC message.
MOST_TEXT_BYTES: Final = 32 << 20


def check_count(tokens: Sequence[Any], max_tokens: int, param: str = "tokens") -> None:
    """Raises InvalidRequest when there are more ids than the model's context holds; max_tokens 0: unknown."""
    most = min(max_tokens or MOST_TOKENS, MOST_TOKENS)
    if len(tokens) > most:
        raise InvalidRequest(
            f"{len(tokens)} token ids are given, and at most {most} are taken at a time; send them in parts",
            param=param,
            code="context_length_exceeded",
        )


def check_answer(tokens: int, bytes_: int, param: str) -> None:
    """Raises InvalidRequest, naming the request's `param`, when an answer of `tokens` ids or `bytes_` of text is too
    long to send."""
    if tokens <= MOST_TOKENS and bytes_ <= MOST_TEXT_BYTES:
        return
    raise InvalidRequest(
        f"the answer would have {tokens} tokens and at least {bytes_} bytes of text; "
        f"at most {MOST_TOKENS} and {MOST_TEXT_BYTES} are sent. Send it in parts",
        param=param,
        code="context_length_exceeded",
    )
