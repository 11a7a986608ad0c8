"""Certificates that are replaced while a process runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.authority import Authority
from contracts.identity import node
from storelink.credentials import Credentials


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_new_files_are_taken_once_they_fit_each_other(tmp_path: Path) -> None:
    authority, clock = Authority(tmp_path), Clock()
    place = authority.issue(node("node-0"), 1).directory
    own = Credentials(place, clock)
    first = own.newest()
    key = (place / "tls.key").read_bytes()
    authority.issue(node("node-0"), 1)
    certificate = (place / "tls.crt").read_bytes()
    newest = (place / "tls.key").read_bytes()
    assert own.newest() == first, "not looked at so soon"
    (place / "tls.key").write_bytes(key)
    clock.now_s = 2.0
    assert own.newest() == first and own.generation == 0, "the new certificate, and the old key"
    (place / "tls.crt").rename(place / "away")
    clock.now_s = 4.0
    assert own.newest() == first, "it is missing"
    (place / "away").rename(place / "tls.crt")
    (place / "tls.key").write_bytes(newest)
    clock.now_s = 6.0
    assert own.newest().certificate == certificate != first.certificate and own.generation == 1
    clock.now_s = 8.0
    assert own.newest().key == newest and own.generation == 1, "nothing has changed since"


def test_a_directory_without_a_certificate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        Credentials(tmp_path)
