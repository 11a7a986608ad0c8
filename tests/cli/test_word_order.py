"""Where flags of asking commands may stand."""

from __future__ import annotations

import pytest

from cli.word_order import command_first


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ("--url http://a:1 status", "status --url http://a:1"),
        ("--url=http://a:1 --json workflows list", "workflows list --url=http://a:1 --json"),
        ("--key k --url u sessions chat-1", "sessions chat-1 --key k --url u"),
        ("status --url u", "status --url u"),
        ("--url u --version", "--version --url u"),
        ("--url u", "--url u"),
        ("--url", "--url"),
        ("", ""),
        ("up --port 1", "up --port 1"),
    ],
)
def test_what_every_asking_command_takes_may_stand_before_its_name(given: str, run: str) -> None:
    assert command_first(given.split()) == run.split()
