"""The lock of an image: one at a time, also while its file is removed; nothing is left of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.weight_images import only, opened, remove_if_unused, remove_unused


def test_one_at_a_time_holds_the_lock_whose_file_goes_each_time(tmp_path: Path) -> None:
    path, inside, most = tmp_path / "upbeat-weights-x.image", list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(200):
            with only(path):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    stop = threading.Event()

    def clean() -> None:
        while not stop.is_set():
            remove_unused(tmp_path)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    stop.set()
    cleaner.join(10)
    assert len(most) == 800 and set(most) == {1}
    assert not list(tmp_path.iterdir())


def test_who_waits_for_a_lock_whose_file_is_removed_makes_a_new_one(tmp_path: Path) -> None:
    path, entered, waiting = tmp_path / "upbeat-weights-x.image", threading.Event(), threading.Event()

    def second() -> None:
        waiting.set()
        with only(path):
            assert path.with_suffix(".lock").exists(), "a third would not wait for it"
            entered.set()

    with only(path):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(5) and not entered.wait(0.05)
    assert entered.wait(5)
    thread.join(5)


def test_a_file_is_removed_by_the_last_who_used_it_and_only_at_its_own_path(tmp_path: Path) -> None:
    path = tmp_path / "upbeat-weights-x.image"
    first, second = opened(path, make=True), opened(path)
    remove_if_unused(path, first)
    remove_unused(tmp_path)
    assert path.exists()
    path.replace(tmp_path / "elsewhere")
    other = opened(path, make=True)
    remove_if_unused(path, second)
    assert path.exists(), "that is another file"
    remove_if_unused(path, other)
    assert not path.exists()
