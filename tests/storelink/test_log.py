"""A link's words reach an engine's own log."""

from __future__ import annotations

import logging

import pytest

from storelink.log import PythonLog


def test_fields_follow_the_words_at_the_level_that_was_meant(caplog: pytest.LogCaptureFixture) -> None:
    log = PythonLog(logging.getLogger("an-engines"))
    with caplog.at_level(logging.INFO, "an-engines"):
        log.debug("nobody looks")
        log.info("attached", store="node-0", arena_bytes=7)
        log.warning("100 % gone")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "attached store='node-0' arena_bytes=7"),
        ("WARNING", "100 % gone"),
    ]
