"""The gateway's decisions, without a network."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contracts.errors import BodyTooLarge, InvalidRequest, NotFound, Unauthorized, Unavailable
from contracts.models import ModelState
from gateway.core.admission import LARGE_BYTES, Caller, Keys, bearer, check_length, parse_json
from gateway.core.implicit import ImplicitSessions, after_answer, after_completion, of_messages, of_prompt
from gateway.core.limits import RateLimits
from gateway.core.refusals import is_final, refusal
from gateway.core.retry import Again, Attempts, GiveUp, RetryLimits
from gateway.core.routing import FleetView, ModelThere, NodeView, direct_route, missing, unserved
from gateway.core.seeds import choice_seed
from gateway.sessions import stated


def said(*texts: str) -> list[dict[str, str]]:
    """A chat: user, assistant, user, ..."""
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


# ---- admission -----------------------------------------------------------------------------------------------------
def test_without_keys_everyone_is_the_default_tenant_with_a_server_key() -> None:
    caller = Keys([]).caller(None)
    assert (caller.tenant, caller.server, caller.priority(-1000)) == ("default", True, -1000)


def test_a_key_names_its_tenant_and_clamps_priority() -> None:
    keys = Keys([("key-aaaaaaaa", Caller("acme", 0)), ("key-bbbbbbbb", Caller("other"))])
    acme = keys.caller("key-aaaaaaaa")
    assert (acme.tenant, acme.priority(-5), acme.priority(7)) == ("acme", 0, 7)
    assert keys.caller("key-bbbbbbbb").tenant == "other"


@pytest.mark.parametrize("credential", [None, "", "key-aaaaaaa", "key-aaaaaaaa ", "\ud800", "x" * 100_000])
def test_any_other_credential_is_unauthorized(credential: str | None) -> None:
    with pytest.raises(Unauthorized):
        Keys([("key-aaaaaaaa", Caller("acme"))]).caller(credential)


def test_only_bearer_credentials_are_read() -> None:
    assert bearer("Bearer abc") == bearer("bearer  abc ") == "abc"
    assert bearer("Basic abc") is bearer("Bearer") is bearer("") is bearer(None) is None


def test_a_length_over_the_limit_is_refused_and_an_unknown_one_is_not() -> None:
    check_length(None, 10)
    check_length(10, 10)
    with pytest.raises(BodyTooLarge):
        check_length(11, 10)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b"\xff\xfe",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 500_000,
        b'{"a":' * 200_000,
    ],
)
def test_what_is_not_plain_json_is_invalid_however_it_is_broken(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as e:
        parse_json(body)
    assert e.value.code == "invalid_json"


# ---- limits --------------------------------------------------------------------------------------------------------
def test_hints_pass_at_the_configured_rate_and_each_tenant_has_its_own() -> None:
    limits = RateLimits(per_s=10)
    assert [limits.take("a", 1, 0.0) for _ in range(10)] == [0.0] * 10
    assert limits.take("a", 1, 0.0) == pytest.approx(0.1)
    assert limits.take("b", 1, 0.0) == 0.0
    assert limits.take("a", 1, 0.1) == 0.0
    assert limits.take("a", 1, 0.1) > 0
    limits.validate()


def test_a_batch_larger_than_the_bucket_passes_when_full_and_leaves_a_debt() -> None:
    limits = RateLimits(per_s=10)
    assert limits.take("a", 50, 0.0) == 0.0
    assert limits.take("a", 1, 0.0) == pytest.approx(4.1)
    assert limits.take("a", 1, 4.2) == 0.0


# ---- implicit sessions ---------------------------------------------------------------------------------------------
def turn(known: ImplicitSessions, messages: list[dict[str, str]], answer: str, suffix: str = "s") -> str:
    history = of_messages("t", "m", messages)
    session = known.resolve(history, suffix)
    known.remember(after_answer(history, answer), session)
    known.validate()
    return session


def test_a_client_that_resends_its_history_is_recognised() -> None:
    known = ImplicitSessions()
    first = turn(known, said("hi"), "hello")
    assert turn(known, said("hi", "hello", "and?"), "that") == first
    assert turn(known, said("hi", "hello", "and?", "that", "more"), "x") == first


def test_an_answer_that_the_client_trimmed_is_still_recognised() -> None:
    known = ImplicitSessions()
    assert turn(known, said("hi"), " hello\n", "a") == turn(known, said("hi", "hello", "and?"), "x", "b")


def test_asking_the_last_question_anew_stays_in_the_session() -> None:
    known = ImplicitSessions()
    first = turn(known, said("hi"), "hello")
    assert turn(known, said("hi", "hello", "one"), "1") == turn(known, said("hi", "hello", "two"), "2") == first


def test_two_conversations_that_begin_alike_are_kept_apart() -> None:
    known = ImplicitSessions()
    one, two = turn(known, said("hi"), "hello", "a"), turn(known, said("hi"), "hey", "b")
    assert one != two
    assert turn(known, said("hi", "hey", "and?"), "x") == two
    assert turn(known, said("hi", "hello", "and?"), "x") == one


def test_after_a_restart_a_conversation_finds_its_first_id_again() -> None:
    first = turn(ImplicitSessions(), said("hi"), "hello")
    assert turn(ImplicitSessions(), said("hi", "hello", "and?"), "x") == first


def test_tenants_and_models_share_no_implicit_session() -> None:
    ids = {ImplicitSessions().resolve(of_messages(t, m, said("hi")), "s") for t in ("a", "b") for m in ("x", "y")}
    assert len(ids) == 4


def test_an_edited_opening_is_another_conversation() -> None:
    known = ImplicitSessions()
    assert turn(known, said("hi"), "hello") != turn(known, said("HI", "hello", "and?"), "x")


def test_no_more_histories_are_remembered_than_fit() -> None:
    known = ImplicitSessions(capacity=3)
    for i in range(20):
        turn(known, said(f"hi {i}"), "hello")
    known.validate()


def test_a_prompt_that_extends_the_last_prompt_and_answer_is_recognised() -> None:
    known = ImplicitSessions()
    for prompt, answer, more in (("p" * 300, "a" * 100, "q" * 50), (list(range(90)), [5] * 40, [6] * 9)):
        history = of_prompt("t", "m", prompt)
        first = known.resolve(history, "x")
        known.remember(after_completion(history, answer), first)
        assert known.resolve(of_prompt("t", "m", prompt + answer + more), "y") == first
        assert known.resolve(of_prompt("t", "m", prompt + more + answer), "z") != first


# ---- stated sessions -----------------------------------------------------------------------------------------------
def test_a_header_goes_before_the_body_and_the_body_before_the_cache_key() -> None:
    headers = {"X-Session-Id": "h", "X-OpenWebUI-Chat-Id": "w"}
    assert stated(headers, "b", "k") == "h"
    assert stated({"X-OpenWebUI-Chat-Id": "w"}, "b", "k") == "w"
    assert stated({}, "b", "k") == "b"
    assert stated({}, "b", "k", "s") == "b"
    assert stated({}, None, "k", "s") == "s"
    assert stated({}, None, "k") == "k"
    assert stated({}, None, None) is stated({}, None, "") is None


def test_a_cache_key_of_any_characters_makes_a_session_id() -> None:
    one, two = stated({}, None, "user 1/../x"), stated({}, None, "user 2/../x")
    assert one is not None and one.startswith("pck-") and one != two


@pytest.mark.parametrize("bad", ["../etc", "a\0b", "", "a b", "ü", "x" * 129, ".."])
def test_a_stated_session_that_is_none_is_refused_naming_its_place(bad: str) -> None:
    for headers, body, place in (({"X-Session-Id": bad}, None, "X-Session-Id"), ({}, bad, "session_id")):
        with pytest.raises(InvalidRequest) as e:
            stated(headers, body, None)
        assert e.value.param == place


# ---- routing without a scheduler -----------------------------------------------------------------------------------
def nodes(*loads: int, absent: int = -1) -> FleetView:
    made = [NodeView(f"n{i}", f"a{i}", i != absent, frozenset({"m"}), running=load) for i, load in enumerate(loads)]
    return FleetView(tuple(made), expected=len(made))


ALL = {"n0", "n1", "n2"}


def routed(
    fleet: FleetView, own: dict[str, int] | None = None, connected: set[str] = ALL, **more: object
) -> str | None:
    route = direct_route(fleet, "m", own or {}, connected, **more)  # type: ignore[arg-type]
    return route.node if route else None


def test_the_least_outstanding_serving_node_is_chosen() -> None:
    assert routed(nodes(3, 1, 2)) == "n1"
    assert routed(nodes(3, 1, 2, absent=1)) == "n2"
    assert routed(nodes(0, 0, 0), {"n0": 2, "n1": 1}) == "n2"


def test_a_node_without_a_stream_comes_last() -> None:
    assert routed(nodes(0, 9), connected={"n1"}) == "n1"
    assert routed(nodes(0), connected=set()) == "n0"


def test_avoided_nodes_are_not_chosen_and_a_pinned_one_is() -> None:
    assert routed(nodes(0, 9), avoid=["n0"]) == "n1"
    assert routed(nodes(0, 9), pin="n1") == "n1"
    assert routed(nodes(0), avoid=["n0"]) is None


def devices(*loads: int) -> FleetView:
    """Two a node."""
    made = [
        NodeView(f"n{i // 2}/{i % 2}", f"a{i}", True, frozenset({"m"}), running=load) for i, load in enumerate(loads)
    ]
    return FleetView(tuple(made), expected=len(made))


def test_without_a_scheduler_devices_are_chosen_as_nodes_are_and_a_nodes_own_store_is_no_source() -> None:
    fleet, streams = devices(9, 0, 1, 2), {"n0/0", "n0/1", "n1/0", "n1/1"}
    assert routed(fleet, connected=streams) == "n0/1"
    assert (
        routed(fleet, connected=streams, pin="n1") == "n1/0" and routed(fleet, connected=streams, pin="n1/1") == "n1/1"
    )
    assert routed(fleet, connected=streams, pin="n1", avoid=["n1/0"]) == "n1/1", (
        "of a node that is pinned, another device"
    )
    assert routed(fleet, connected=streams, pin="n1/1", avoid=["n1/1"]) == "n1/1"
    for last, sources in (("n0/0", ()), ("n1/0", ("n1",))):
        route = direct_route(devices(90, 0, 90, 90), "m", {}, streams, last=last)
        assert route is not None and (route.node, route.source_nodes) == ("n0/1", sources)


def test_devices_are_counted_as_devices() -> None:
    fleet = devices(0, 0, 0, 0)
    told = missing(FleetView(fleet.nodes[:3], expected=4), True, {n.name for n in fleet.nodes}, False)
    assert told == ["3 of 4 devices serve"]


def test_a_model_that_no_node_serves_has_no_route() -> None:
    assert direct_route(nodes(0), "other", {}, ALL) is None


def test_one_node_that_serves_the_model_and_has_a_stream_is_enough_to_be_ready() -> None:
    assert unserved(nodes(0, 0, absent=1), ["m"], {"n0"}, False) == []
    assert unserved(FleetView(nodes(0).nodes, expected=3), ["m"], ALL, False) == []
    assert unserved(nodes(0, 0, absent=1), ["m"], {"n1"}, False) == [
        "no node that serves m has a stream to this gateway"
    ]
    assert unserved(nodes(0, absent=0), ["m"], ALL, False) == ["no node serves m"]
    assert unserved(FleetView(), ["m"], ALL, False) == ["no node serves m"]
    assert unserved(None, ["m"], ALL, False) == ["the scheduler does not answer"]
    assert unserved(nodes(0), ["m"], ALL, True) == ["the gateway is draining"]


def test_ready_needs_a_node_for_each_configured_model() -> None:
    fleet = FleetView((*nodes(0).nodes, NodeView("n1", "a1", True, frozenset({"other"}))), expected=2)
    assert unserved(fleet, ["m", "other"], ALL, False) == []
    assert unserved(fleet, ["m", "other"], {"n0"}, False) == ["no node that serves other has a stream to this gateway"]
    assert unserved(fleet, ["m", "third"], ALL, False) == ["no node serves third (served: m, other)"]
    dead = FleetView((fleet.nodes[0], replace(fleet.nodes[1], serving=False, state="dead")), expected=2)
    assert unserved(dead, ["m", "other"], ALL, False) == ["no node serves other (served: m)"]


@pytest.mark.parametrize("state", [ModelState.COLD, ModelState.LOADING, ModelState.DRAINING])
def test_a_model_that_a_serving_node_can_wake_is_no_reason_against_being_ready(state: ModelState) -> None:
    asleep = NodeView("n1", "a1", True, there=(ModelThere("other", state),))
    assert unserved(FleetView((*nodes(0).nodes, asleep)), ["m", "other"], ALL, False) == []
    assert unserved(FleetView((*nodes(0).nodes, replace(asleep, serving=False))), ["m", "other"], ALL, False)


def test_that_every_node_serves_needs_every_expected_node_now_and_a_stream_to_it() -> None:
    fleet = nodes(0, 0)
    assert missing(fleet, True, ALL, False) == []
    assert missing(None, False, ALL, False)
    assert missing(fleet, False, ALL, False)
    assert missing(fleet, True, ALL, True)
    assert missing(fleet, True, {"n0"}, False)
    assert missing(nodes(0, 0, absent=1), True, ALL, False)
    assert missing(FleetView(fleet.nodes, expected=3), True, ALL, False)
    assert missing(FleetView(), True, ALL, False)


def test_why_a_deployment_is_not_ready_says_starting_while_a_node_starts_and_absent_once_it_is_lost() -> None:
    def told(state: str) -> list[str]:
        starting = NodeView("n1", "a1", False, frozenset(), state=state)
        return missing(FleetView((nodes(0).nodes[0], starting), expected=2), True, {"n0"}, False)

    assert told("starting") == ["1 of 2 nodes serve", "n1 is starting"]
    assert told("absent") == ["1 of 2 nodes serve", "n1 does not serve (absent)"]
    assert told("") == ["1 of 2 nodes serve", "n1 does not serve"]


# ---- attempts ------------------------------------------------------------------------------------------------------
def test_a_request_is_given_to_three_workers_at_most() -> None:
    attempts = Attempts(RetryLimits(attempts=3))
    assert attempts.lost("n0", 0.0, "lost", ran=True) == Again(0.0)
    assert attempts.lost("n1", 0.0, "lost", ran=True) == Again(0.0)
    assert attempts.avoid == ["n0", "n1"]
    assert isinstance(attempts.lost("n2", 0.0, "lost", ran=True), GiveUp)


def test_waiting_for_a_node_is_bounded_by_time_only_and_forgives() -> None:
    attempts = Attempts(RetryLimits(total_s=10, pause_s=0.5))
    attempts.lost("n0", 100.0, "lost", ran=True)
    for step in range(20):
        assert attempts.no_node(100.0 + step * 0.49, "none") == Again(0.5)
    assert attempts.avoid == []
    assert isinstance(attempts.no_node(110.0, "none"), GiveUp)


def test_a_pinned_node_is_never_avoided() -> None:
    attempts = Attempts(RetryLimits(), pin="n0")
    attempts.lost("n0", 0.0, "lost", ran=False)
    assert attempts.avoid == []


def test_refusals_carry_the_schedulers_error_and_anything_else_is_the_transports() -> None:
    error = refusal('[404, "no such model", "model", "model_not_found"]')
    assert isinstance(error, NotFound) and error.param == "model"
    assert refusal("connection refused") is refusal("[1]") is refusal('{"a": 1}') is refusal("7") is None


def test_waiting_helps_unless_the_caller_is_wrong() -> None:
    assert not is_final(Unavailable("x"), model_known=True, pin_known=True)
    assert is_final(InvalidRequest("x"), model_known=True, pin_known=True)
    assert is_final(NotFound("x", param="model"), model_known=False, pin_known=True)
    assert not is_final(NotFound("x", param="model"), model_known=True, pin_known=True)
    assert not is_final(InvalidRequest("x", param="X-Upbeat-Node"), model_known=True, pin_known=True)


def test_choices_have_different_seeds_and_the_first_has_the_callers() -> None:
    seeds = [choice_seed(42, i) for i in range(8)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 8
    assert all(0 <= choice_seed(s, i) < 2**63 for s in (-1, 0, 2**64) for i in (0, 1))


# ---- large bodies --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text",
    [
        '{"a": "é\\n\\u00e9", "b": [1, -2.5, 1e3, null, true, 12345678901234567890123], "a": 2}',
        '"\\ud83d\\ude00"',
        "[]",
    ],
)
def test_a_large_body_is_decoded_as_a_small_one(text: str) -> None:
    small = parse_json(text.encode())
    assert (
        parse_json((" " * (LARGE_BYTES + 1) + text).encode())
        == small
        == parse_json((text + "\n" * LARGE_BYTES).encode())
    )


@pytest.mark.parametrize("text", ["", "{", "[NaN]", "[-Infinity]", "[1] 2", '"\udcff"', "[01]", "[" * 5000])
def test_a_large_body_that_is_no_json_is_refused_as_a_small_one(text: str) -> None:
    seen = []
    for padding in ("", " " * (LARGE_BYTES + 1)):
        with pytest.raises(InvalidRequest) as e:
            parse_json((padding + text).encode("utf-8", "surrogateescape"))
        seen.append(e.value.code)
    assert seen == ["invalid_json"] * 2
