"""The journal of erasures: what it says after any end of the process, whatever became of the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from contracts.ids import SessionKey
from kvstore.core.tombstone import OpenErasure, Tombstone
from kvstore.tiers import journal as module
from kvstore.tiers.journal import Journal, JournalFull


def erasure(n: int, keys: int = 3, *, blind: bool = False) -> OpenErasure:
    chunks = {bytes([n % 256, k % 256, k // 256]).ljust(32, b"."): b"f" * 32 for k in range(keys)}
    return OpenErasure(Tombstone(SessionKey("tenänt\n", f"s{n}"), n + 1, chunks), blind)


def loaded(path: Path) -> Journal:
    made = Journal(path)
    made.load()
    return made


def test_what_is_open_is_open_after_a_restart_and_what_has_ended_is_not(tmp_path: Path) -> None:
    path = tmp_path / "node" / "journal"
    first = loaded(path)
    for n in range(3):
        first.note(erasure(n, blind=n == 2))
    first.note(erasure(0, 5))
    first.done(erasure(1).tombstone.session)
    first.note_floor(40)
    second = loaded(path)
    assert (
        list(second.open.values()) == [erasure(0, 5), erasure(2, blind=True)]
        and second.floor == 40
        and not second.damaged
    )
    second.done(erasure(0).tombstone.session)
    second.done(erasure(0).tombstone.session)
    assert list(loaded(path).open.values()) == [erasure(2, blind=True)]


@pytest.mark.parametrize("cut", [2, 20, 200])
def test_a_torn_tail_loses_the_entry_that_was_being_written_and_no_other(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    first = loaded(path)
    for n in range(3):
        first.note(erasure(n))
    path.write_bytes(path.read_bytes()[:-cut])
    second = loaded(path)
    assert list(second.open.values()) == [erasure(0), erasure(1)] and second.damaged == 1
    second.note(erasure(7))
    assert list(loaded(path).open.values()) == [erasure(0), erasure(1), erasure(7)], "what comes after it is whole"


def test_damage_in_the_middle_loses_that_line_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    first = loaded(path)
    for n in range(4):
        first.note(erasure(n))
    lines = path.read_bytes().split(b"\n")
    for damaged in (lines[2].replace(b"s1", b"s9"), b"\xff" * 50, b"", b"0" * 16 + b" {}", b"[]"):
        path.write_bytes(b"\n".join([*lines[:2], damaged, *lines[3:]]))
        assert [e.tombstone.session.session_id for e in loaded(path).open.values()] == ["s0", "s2", "s3"]


def test_the_file_is_written_anew_when_most_of_it_is_history(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HISTORY_BYTES", 4000)
    path = tmp_path / "journal"
    made = loaded(path)
    made.note(erasure(200))
    for n in range(100):
        made.note(erasure(n))
        made.done(erasure(n).tombstone.session)
        assert path.stat().st_size < 10_000
    again = loaded(path)
    assert list(again.open.values()) == [erasure(200)] and again.floor == 201


def test_it_is_bounded_one_more_is_refused_and_names_of_chunks_are_left_out_first(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_OPEN", 4)
    monkeypatch.setattr(module, "MOST_BYTES", 10_000)
    made = loaded(tmp_path / "journal")
    made.note(erasure(0, 100))
    made.note(erasure(1, 200))
    assert made.open[erasure(1).tombstone.session] == OpenErasure(
        Tombstone(erasure(1).tombstone.session, 2), blind=True
    )
    for n in (2, 3, 3):
        made.note(erasure(n))
    with pytest.raises(JournalFull):
        made.note(erasure(4))
    assert len(loaded(tmp_path / "journal").open) == 4


def test_one_tenant_leaves_places_for_the_others(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(module, "MOST_OF_A_TENANT", 3)
    made = loaded(tmp_path / "journal")
    for n in range(3):
        made.note(erasure(n))
    made = loaded(tmp_path / "journal")
    with pytest.raises(JournalFull):
        made.note(erasure(3))
    made.note(OpenErasure(Tombstone(SessionKey("another", "s"), 9)))
    made.done(erasure(0).tombstone.session)
    made.note(erasure(3))


def test_an_entry_that_could_not_be_written_is_not_taken_for_noted_and_the_next_one_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    made = loaded(path)
    made.note(erasure(0))
    os.close(made._fd)  # as if the disk were gone: every write to it fails
    with pytest.raises(OSError, match="Bad file"):
        made.note(erasure(1))
    made._fd = -1
    assert list(made.open.values()) == [erasure(0)]
    made.note(erasure(2))
    assert list(loaded(path).open.values()) == [erasure(0), erasure(2)]


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "journal").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        loaded(tmp_path / "journal")
    assert (tmp_path / "elsewhere").read_text() == "kept"
