"""A caller's trace context is taken only if it is exactly as the standard has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.trace_context import MOST_MEMBERS, MOST_STATE, TraceContext, checked_state, from_headers, from_wire
from tests.traced import SAMPLED, SPAN_ID, TRACE_ID, UNSAMPLED


def test_a_context_is_read_and_told_on_as_it_came() -> None:
    context = from_headers([SAMPLED], ["vendor=1", "a@b=x y"])
    assert context == TraceContext(TRACE_ID, SPAN_ID, True, "vendor=1,a@b=x y")
    assert context.headers == [("traceparent", SAMPLED), ("tracestate", "vendor=1,a@b=x y")]
    assert from_wire(context.to_wire()) == context
    unsampled = from_headers([UNSAMPLED], [])
    assert unsampled is not None and not unsampled.sampled and unsampled.headers == [("traceparent", UNSAMPLED)]
    assert from_wire("") is None and from_wire(7) is None and from_wire(["x"]) is None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "x",
        SAMPLED.upper(),
        SAMPLED.replace("00-", "ff-", 1),
        SAMPLED + "-more",
        SAMPLED + "\n",
        SAMPLED[:-1],
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-0g",
        SAMPLED.replace("-", "_"),
        "\u0660" + SAMPLED[1:],
        "00-" * 100_000,
    ],
)
def test_a_bad_parent_is_ignored(parent: str) -> None:
    assert from_headers([parent], []) is None


def test_a_later_version_may_say_more_and_two_parents_are_none() -> None:
    assert from_headers([f"01-{TRACE_ID}-{SPAN_ID}-03-new"], []) == TraceContext(TRACE_ID, SPAN_ID, True)
    assert from_headers([SAMPLED, SAMPLED], []) is None


@pytest.mark.parametrize("state", ["a", "a=", "A=1", "a=1,a=2", "a=1,=2", "a=\x01", "a=é", "a=1=2", "a" * 300 + "=1"])
def test_a_bad_state_is_dropped_and_the_parent_kept(state: str) -> None:
    assert from_headers([SAMPLED], [state]) == TraceContext(TRACE_ID, SPAN_ID)


def test_a_long_state_is_bounded() -> None:
    long = ",".join(f"k{i}={'v' * 60}" for i in range(20))
    kept = checked_state(long)
    assert long.startswith(kept + ",") and MOST_STATE - 70 < len(kept) <= MOST_STATE
    assert checked_state(",".join(f"k{i}=1" for i in range(MOST_MEMBERS + 1))) == ""
    assert checked_state("a=1," * 1_000_000) == ""


@given(st.text(), st.lists(st.text()))
def test_nothing_that_a_caller_sends_raises_or_passes_unchecked(parent: str, states: list[str]) -> None:
    found = from_headers([parent], states)
    assert found is None or from_wire(found.to_wire()) == found
    state = checked_state(",".join(states))
    assert state.isprintable() and state.isascii() and len(state) <= MOST_STATE
