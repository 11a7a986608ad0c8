"""How long a list of token ids, and the text of one, may be where the tokenizer is asked for nothing else (`/tokenize`, `/detokenize`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from contracts.errors import InvalidRequest

#: Ids of one list, whatever the model's context holds.
MOST_TOKENS: Final = 1 << 20
#: Of one list's text in UTF-8, and of what the vocabulary calls its tokens: half of what a gRPC message takes.
MOST_TEXT_BYTES: Final = 32 << 20


def check_count(tokens: Sequence[Any], max_tokens: int, param: str = "tokens") -> None:
    """Raises InvalidRequest when more ids are given than the model's context holds; max_tokens 0: not known."""
    most = min(max_tokens or MOST_TOKENS, MOST_TOKENS)
    if len(tokens) > most:
        raise InvalidRequest(
            f"{len(tokens)} token ids are given, and at most {most} are taken at a time; send them in parts",
            param=param,
            code="context_length_exceeded",
        )


def check_answer(tokens: int, bytes_: int, param: str) -> None:
    """Raises InvalidRequest when an answer of so many ids, or of so many bytes of text, is longer than is sent; `param`: what was asked."""
    if tokens <= MOST_TOKENS and bytes_ <= MOST_TEXT_BYTES:
        return
    raise InvalidRequest(
        f"the answer would have {tokens} tokens and at least {bytes_} bytes of text; "
        f"at most {MOST_TOKENS} and {MOST_TEXT_BYTES} are sent. Send it in parts",
        param=param,
        code="context_length_exceeded",
    )
