"""Splits a chat's answer into what the model thought and what it said.

A thought stands between `<think>` and `</think>` at the beginning of the answer; some templates write `<think>` at the
end of the prompt. Space around a thought belongs to neither part. A model that never ends its thought has said nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from contracts.request import TokenLogprob

BEGIN, END = "<think>", "</think>"
#: More space than this counts as text and is not held back.
MOST_SPACE = 4096
State = Literal["undecided", "thinking", "thought", "saying"]


class ReasoningReader:
    """Splits an answer piece by piece. state: undecided: the answer may still begin with a thought; thought: the
    thought has ended and nothing was said since.

    Invariant: it holds back at most `MOST_SPACE` characters of space and the possible beginning of a tag.
    """

    def __init__(self, thinking: bool) -> None:
        """thinking: the prompt ends within a thought."""
        self.state: State = "thinking" if thinking else "undecided"
        self._held = ""
        self._begun = False

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """The thought and the said text of the next piece. last: the final piece, after which nothing is held back."""
        if self.state == "saying":
            return "", text
        text, self._held = self._held + text, ""
        thought = ""
        if self.state == "undecided":
            rest = text.lstrip()
            if not last and BEGIN.startswith(rest) and rest != BEGIN and len(text) - len(rest) <= MOST_SPACE:
                self._held = text
                return "", ""
            if not rest.startswith(BEGIN):
                self.state = "saying"
                return "", text
            self.state, text = "thinking", rest[len(BEGIN) :]
        if self.state == "thinking":
            thought, found, text = text.partition(END)
            if not found:
                return self._still_thinking(thought, last), ""
            thought = self._without_space_before(thought).rstrip()
            self.state = "thought"
        text = text.lstrip()
        if text:
            self.state = "saying"
        return thought, text

    def _still_thinking(self, text: str, last: bool) -> str:
        keep = next((n for n in range(min(len(END) - 1, len(text)), 0, -1) if END.startswith(text[-n:])), 0)
        text, tag = (text, "") if last else (text[: len(text) - keep], text[len(text) - keep :])
        shown = text.rstrip()
        if len(text) - len(shown) > MOST_SPACE:
            shown = text
        self._held = "" if last else text[len(shown) :] + tag
        return self._without_space_before(shown)

    def _without_space_before(self, text: str) -> str:
        text = text if self._begun else text.lstrip()
        self._begun = self._begun or bool(text)
        return text


class SaidLogprobs:
    """Finds the logprobs of what is said after a thought."""

    def __init__(self) -> None:
        self._undecided: list[TokenLogprob] = []

    def of(self, before: State, after: State, said: str, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Those of an output that say something. before, after: the reader's state around its push. said: its text
        without the thought."""
        held, self._undecided = [*self._undecided, *logprobs], []
        if after == "undecided":
            self._undecided = held
        if after != "saying":
            return []
        if before == "thinking" or (before == "undecided" and self._began_with_thought(held)):
            return _last(held, len(said.encode("utf-8", "surrogatepass")))
        return held

    def _began_with_thought(self, held: Sequence[TokenLogprob]) -> bool:
        text = b"".join(one.token for one in held[: len(BEGIN) + MOST_SPACE])
        return text.lstrip().startswith(BEGIN.encode())


def _last(held: Sequence[TokenLogprob], length: int) -> list[TokenLogprob]:
    """The last tokens that have so many bytes."""
    start = len(held)
    while start and length > 0:
        start -= 1
        length -= len(held[start].token)
    return list(held[start:])
