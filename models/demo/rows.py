"""Conversations as the model sees them: tokens, and which of them answer what. The text is what the chat template makes
of the messages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conversations import Conversation, Course, conversation, told_first
from structured import in_values
from teller import Teller
from transformers import AutoTokenizer

HERE = Path(__file__).parent
#: Weights in the loss, by what a token belongs to; what users and tools say has none.
RECALL, ECHO, ANSWER, SAID = 1.0, 0.6, 0.25, 0.0

#: Share of the rows with all questions at the end, as in an evaluation.
TOLD_FIRST = 0.4


@dataclass
class Rendered:
    """A conversation's tokens with their weights in the loss. starts: where each message begins. recalls: `[begin,
    end)` of each recall."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    starts: list[tuple[int, bool]] = field(default_factory=list)
    recalls: list[tuple[int, int]] = field(default_factory=list)


class Renderer:
    """Makes tokens of conversations."""

    def __init__(self, directory: Path = HERE) -> None:
        self.tok = AutoTokenizer.from_pretrained(directory)
        self._backend = self.tok.backend_tokenizer
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        known = self._known.get(text)
        if known is None:
            if len(self._known) > 50_000:
                self._known.clear()
            known = self._known[text] = self._backend.encode(text, add_special_tokens=False).ids
        return known

    def spelling(self, token: int) -> str:
        """The token's text; of a part of a character, something of its length."""
        return self._backend.decode([token], skip_special_tokens=False)

    def count(self, messages: list[dict[str, Any]]) -> int:
        """Length of the messages in tokens."""
        return sum(len(self.encode(m["content"])) + 5 for m in messages)

    def render(self, talk: Conversation) -> Rendered:
        """Every message with its head and end; what tools there are stands in the system message."""
        made = Rendered()
        recalls, echoes = set(talk.recalls), set(talk.echoes)
        objects = {i for i, kind in zip(talk.recalls, talk.kinds, strict=True) if kind == "JSON"}
        messages = talk.messages
        if talk.tools and (not messages or messages[0]["role"] != "system"):
            self._add(made, "<|im_start|>system", listed(talk.tools), 0.0)
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            speaks = role == "assistant"
            made.starts.append((len(made.ids), speaks))
            weight = RECALL if i in recalls else ECHO if i in echoes else ANSWER if speaks else SAID
            begin = self._add(
                made,
                f"<|im_start|>{role}\n",
                content + (listed(talk.tools) if talk.tools and i == 0 and role == "system" else ""),
                weight,
            )
            if i in recalls:
                made.recalls.append((begin, len(made.ids) - 1))
            if i in objects:
                self._lighten_keys(made, begin, content)
        return made

    def _add(self, made: Rendered, head: str, body: str, weight: float) -> int:
        opening, said = self.encode(head), self.encode(body + "<|im_end|>")
        begin = len(made.ids) + len(opening)
        made.ids += [*opening, *said, *self.encode("\n")]
        made.weights += [0.0] * len(opening) + [weight] * len(said) + [0.0]
        return begin

    def _lighten_keys(self, made: Rendered, begin: int, text: str) -> None:
        """Of a JSON object that begins at token `begin`, values and their ends keep their weight: the keys are the
        schema's."""
        inside, at = [*in_values(text), False], 0
        for i, token in enumerate(self.encode(text)):
            end = at + len(self.spelling(token))
            if not any(inside[max(at - 1, 0) : end]):
                made.weights[begin + i] = ANSWER
            at = end


def listed(tools: list[dict[str, Any]]) -> str:
    """What the chat template tells of tools, each in a line."""
    functions = [tool["function"] for tool in tools]
    lines = [
        f"\n{f['name']}({', '.join(f['parameters']['properties'])})"
        + (f": {f['description']}" if f["description"] else "")
        for f in functions
    ]
    return "\n\nTools:" + "".join(lines)


Row = tuple[list[int], list[int], list[float]]


def training_row(rng: random.Random, renderer: Renderer, length: int) -> Row:
    """`(ids, positions, weights)` of a conversation of about `length` tokens.

    In a third of them, random gaps lie between the positions of messages, so that the rotary embedding meets distances
    far beyond the trained lengths (randomised positions)."""
    length_of_talk = rng.randint(length * 3 // 4, length)
    if rng.random() < TOLD_FIRST:
        talk = told_first(Course(Teller(rng)), length_of_talk, renderer.count).talk
    else:
        talk = conversation(rng, length_of_talk, renderer.count, structured=True)
    made = renderer.render(talk)
    positions = list(range(len(made.ids)))
    if rng.random() < 0.35:
        spare, at, last = rng.randint(0, max(4000 - length, length)), 0, 0
        shifted: list[int] = []
        for begin, speaks in [*made.starts, (len(made.ids), True)]:
            shifted += range(last + at, begin + at)
            last = begin
            if spare and not speaks and rng.random() < 0.3:
                gap = rng.randint(0, spare)
                spare, at = spare - gap, at + gap
        positions = shifted
    return made.ids[: length + 1], positions[: length + 1], made.weights[: length + 1]
