"""The SSD's files as objects of a blob tier that is a directory: linked where that can be done, copied elsewhere, whole
in either case."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from kvstore.tiers import links
from kvstore.tiers.links import link
from kvstore.tiers.objects import Objects, open_store


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "ssd" / "chunk"
    made.parent.mkdir()
    made.write_bytes(b"whole")
    os.utime(made, (0, 0))
    return made


def put(store: Objects, data: Path | bytes) -> bool:
    return asyncio.run(store.put("blob", "chunks/ab/cd", data))


def test_a_file_of_the_same_file_system_is_not_copied_and_outlives_its_first_name(tmp_path: Path, file: Path):
    store, there = Objects(open_store("", {}, tmp_path / "blob")), tmp_path / "blob" / "v3" / "chunks" / "ab" / "cd"
    assert put(store, file)
    assert there.samefile(file)
    assert there.stat().st_mtime > time.time() - 60, (
        "an object is as old as it has been one: what nobody names is given time by that"
    )
    file.unlink()
    assert asyncio.run(store.get("chunks/ab/cd")) == b"whole"
    assert [p.name for p in there.parent.iterdir()] == ["cd"]


def test_what_has_the_name_is_replaced_and_linking_again_changes_nothing(tmp_path: Path, file: Path):
    there = tmp_path / "blob" / "v3" / "cd"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"damaged")
    for _ in range(2):
        assert link(file, there)
        assert there.samefile(file)
        assert [p.name for p in there.parent.iterdir()] == ["cd"]


def test_a_new_object_is_there_at_once_so_that_a_kill_leaves_nothing_half_done(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Path, "replace", lambda *_: pytest.fail("there is nothing to replace"))
    there = tmp_path / "blob" / "v3" / "cd"
    assert link(file, there)
    os.utime(file, (0, 0))
    assert link(file, there)
    assert there.stat().st_mtime > time.time() - 60, "what is offered again is kept for as long as what is new"


def test_where_there_are_no_links_files_are_copied(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch):
    tried = []

    def refuse(*args: object, **_: object) -> None:
        tried.append(args)
        raise OSError(links.errno.EXDEV, "two file systems")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(
        os, "utime", lambda *_, **__: pytest.fail("a disk that can only be read can still be copied from")
    )
    store, there = Objects(open_store("", {}, tmp_path / "blob")), tmp_path / "blob" / "v3" / "chunks" / "ab" / "cd"
    assert put(store, file)
    assert put(store, file)
    assert len(tried) == 1, "it is not tried for every chunk"
    assert there.read_bytes() == b"whole"
    assert not there.samefile(file)


def test_a_file_that_is_gone_and_a_directory_that_cannot_be_made_are_failures_and_leave_nothing(
    tmp_path: Path, file: Path
):
    store = Objects(open_store("", {}, tmp_path / "blob"))
    assert not put(store, tmp_path / "gone")
    assert not list((tmp_path / "blob").rglob("cd*"))
    assert put(store, file), "linking is still tried"
    (tmp_path / "other").write_bytes(b"")
    with pytest.raises((FileExistsError, NotADirectoryError)):
        link(file, tmp_path / "other" / "cd")
