"""When a connection is late: with its headers, or with taking what is written to it."""

from __future__ import annotations

from gateway.core.deadlines import PROGRESS_BYTES, Deadlines, Limits

LIMITS = Limits(header_s=20.0, write_s=30.0)
KIB = 1 << 10


def test_the_first_headers_are_awaited_from_the_beginning_and_later_ones_from_their_first_byte() -> None:
    one = Deadlines(LIMITS, 100.0)
    assert one.late(120.0, 0) is None and one.late(120.1, 0) == "headers"
    one.heard(119.0)
    assert one.late(120.1, 0) == "headers", "a byte at a time is no headers"
    one.began()
    assert one.late(1e6, 0) is None
    one.heard(1e6)
    one.ended()
    assert one.late(2e6, 0) is None, "what came with a request is its body, and to rest is no lateness"
    one.heard(2e6)
    assert one.late(2e6 + 20, 0) is None and one.late(2e6 + 21, 0) == "headers"


def serving() -> Deadlines:
    one = Deadlines(LIMITS, 0.0)
    one.began()
    return one


def test_who_takes_nothing_is_late_after_the_deadline_and_not_before() -> None:
    one = serving()
    assert [one.late(now, 64 * KIB) for now in (100.0, 110.0, 130.0)] == [None] * 3
    assert one.late(130.1, 64 * KIB) == "write"


def test_a_byte_a_second_is_not_enough() -> None:
    one, found = serving(), []
    for second in range(40):
        found.append(one.late(100.0 + second, 64 * KIB - second))
    assert found[:31] == [None] * 31 and found[31] == "write"


def test_who_takes_it_slowly_is_not_late() -> None:
    one = serving()
    for turn in range(100):
        assert one.late(turn * 29.0, 8_000 * KIB - turn * PROGRESS_BYTES) is None
    assert one.late(1e5, 0) is None and one.late(2e5, 1) is None, "nothing waited"


def test_who_keeps_up_with_a_stream_is_not_late_though_something_always_waits() -> None:
    one = serving()
    for second in range(200):
        assert one.late(float(second), 60 * KIB) is None
        if second % 10 == 9:
            one.took()


def test_what_is_written_more_meanwhile_is_no_lack_of_progress() -> None:
    one = serving()
    assert one.late(0.0, 64 * KIB) is None
    assert one.late(10.0, 128 * KIB) is None, "more is written"
    assert one.late(20.0, 96 * KIB) is None and one.late(49.0, 96 * KIB) is None, "and half of that is taken"
    assert one.late(51.0, 96 * KIB) == "write"
