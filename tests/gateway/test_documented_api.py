"""docs/api.md names every session header and every parameter that works."""

from __future__ import annotations

from pathlib import Path

from gateway.openai.requests import ChatRequest
from gateway.sessions import HEADERS

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_session_header_is_documented() -> None:
    assert [h for h in HEADERS if f"`{h}`" not in DOCUMENT] == []


def test_every_parameter_that_works_is_documented() -> None:
    assert [name for name in ChatRequest.model_fields if f"`{name}`" not in DOCUMENT and name != "model"] == []
