"""The policies of `upbeat bench`, and request fields that make answers equally long under each.

- recompute: no KV kept across requests; balanced placement, no hints.
- sticky: a session stays on the node with its cache (InferCept's offload); no hints.
- balanced: Upbeat: balanced placement, hints when typing starts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.client import Outcome

#: Fixed answers repeat the first of these words that is one token.
_STEERED_WORDS = ("Ġrivers", "Ġthe", "▁the")


@dataclass(frozen=True, slots=True)
class Policy:
    """How a stack is started and whether its clients send hints."""

    name: str
    placement: str
    cache: bool
    hints: bool


POLICIES = {
    p.name: p
    for p in (
        Policy("recompute", placement="balanced", cache=False, hints=False),
        Policy("sticky", placement="sticky", cache=True, hints=False),
        Policy("balanced", placement="balanced", cache=True, hints=True),
    )
}


def parse_policies(text: str) -> list[Policy]:
    """Policies from a comma-separated list. Raises ValueError naming the unknown one and those that exist."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in POLICIES:
            raise ValueError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    if not names:
        raise ValueError(f"no policy given; there are {', '.join(POLICIES)}")
    return [POLICIES[name] for name in dict.fromkeys(names)]


def fixed_answers(model: Path) -> dict[str, Any]:
    """Request fields that make every answer exactly as long as planned, and of known words.

    Random weights answer with arbitrary bytes, which tokenise differently when the client sends them back, so the next
    turn would miss the cache as with no real model. If the tokenizer has a known word, its logit bias makes it the
    answer.
    """
    body: dict[str, Any] = {"ignore_eos": True}
    try:
        vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return body
    for word in _STEERED_WORDS:
        if isinstance(vocabulary, dict) and word in vocabulary:
            return body | {"logit_bias": {str(vocabulary[word]): 100}}
    return body


def model_max_tokens(model: Path) -> int:
    """The longest context of the model at `model`. Raises ValueError if its config.json does not have it."""
    try:
        return int(json.loads((model / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{model}/config.json must have max_position_embeddings ({e}); or give --length-scale") from e


def raw(o: Outcome) -> dict[str, Any]:
    """One request's times for JSON."""
    return {
        "session": o.session_id,
        "turn": o.turn,
        "planned_s": round(o.planned_s, 4),
        "sent_s": round(o.sent_s, 4),
        "ttft_s": round(o.ttft_s, 4),
        "end_s": round(o.end_s, 4),
        "prompt_tokens": o.prompt_tokens,
        "output_tokens": o.output_tokens,
        "cached_tokens": o.cached_tokens,
        "node": o.node,
        "priority": o.priority,
        "tenant": o.tenant,
        "model": o.model,
        "hint_s": None if o.hint is None else round(o.hint.sent_s, 4),
        "error": o.error,
    }
