"""docs/api.md names every session header and every parameter that works; docs/hints.md every other spelling of a
hint."""

from __future__ import annotations

from pathlib import Path

from gateway.core.kv_hints import ACTIONS, NOT_DONE
from gateway.core.spellings import FIELDS, FINAL, HEADERS, PRIORITY, THREADS, WITHOUT_EFFECT
from gateway.openai.parameters import HARMLESS
from gateway.openai.requests import ChatRequest

DOCS = Path(__file__).parents[2] / "docs"
API, HINTS = (DOCS / "api.md").read_text(), (DOCS / "hints.md").read_text()


def test_every_session_header_is_documented() -> None:
    assert [h for h in HEADERS if f"`{h}`" not in API or f"`{h}`" not in HINTS] == []


def test_every_parameter_that_works_is_documented() -> None:
    assert [name for name in ChatRequest.model_fields if f"`{name}`" not in API and name != "model"] == []


def test_every_parameter_that_is_ignored_is_said_to_be() -> None:
    told = API.split("Accepted and ignored")[1].split("\n\n")[0]
    assert [name for name in HARMLESS if f"`{name}`" not in told] == []


def test_every_other_spelling_is_documented() -> None:
    known = [*FIELDS, *ACTIONS, *NOT_DONE, *THREADS.values(), FINAL, PRIORITY]
    assert [name for name in known if f"`{name}`" not in HINTS] == []


def test_what_has_no_effect_is_said_to_have_none() -> None:
    told = HINTS.split("## Accepted, without effect")[1]
    assert [name for name in WITHOUT_EFFECT if f"`{name}`" not in told] == []
