"""What a gateway says of placement, and what it tells the scheduler of its callers."""

from __future__ import annotations

import ipaddress

import pytest
from gateway_fakes import MODEL, stack, until
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import Caller, Keys
from gateway.core.callers import Callers

KEYS = [{"key": "key-of-acme", "tenant": "acme"}]
ACME = {"Authorization": "Bearer key-of-acme"}
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


# ---- callers


def test_an_address_is_a_digest_that_every_gateway_of_a_deployment_makes_alike() -> None:
    one, same, other = Callers(["key-aaaa", "key-bbbb"]), Callers(["key-bbbb", "key-aaaa"]), Callers(["key-cccc"])
    assert one.digest("10.0.0.7") == same.digest("10.0.0.7") != other.digest("10.0.0.7")
    assert one.digest("10.0.0.7") != one.digest("10.0.0.8") and len(one.digest("10.0.0.7")) == 16
    assert one.digest("::ffff:10.0.0.7") == one.digest("10.0.0.7")
    assert one.digest(None) == one.digest("") == one.digest("/run/a.sock") == ""


def test_an_ipv6_network_is_one_caller() -> None:
    c = Callers([])
    assert c.digest("2001:db8:1:2:3::4") == c.digest("2001:db8:1:2:ffff::1") != c.digest("2001:db8:1:3::4")
    assert c.digest("fe80::1%eth0") == c.digest("fe80::1")


@given(st.ip_addresses() | st.text(max_size=30))
def test_no_address_can_be_read_off_its_digest_and_none_breaks_it(address: ipaddress.IPv4Address | str) -> None:
    digest = Callers(["key-aaaa"]).digest(str(address))
    assert len(digest) in (0, 16) and (not digest or str(address) not in digest)


async def test_the_scheduler_is_told_whom_a_hint_comes_from() -> None:
    async with stack() as s:
        await s.post("/v1/advisory", {"advisories": [{"session_id": "a"}, {"session_id": "b"}]})
        await until(lambda: len(s.scheduler.advised) == 2)
        assert {a.caller for a in s.scheduler.advised} == {Callers([]).digest("127.0.0.1")}


# ---- explaining


async def test_a_sessions_last_decisions_are_shown_with_their_scores() -> None:
    async with stack() as s:
        status, body = await s.get("/v1/sessions/chat-1/placement")
        assert status == 200 and (body["id"], body["object"]) == ("chat-1", "session.placement")
        turn, hint = body["decisions"]
        assert (turn["what"], turn["node"], turn["request_id"], turn["hinted"]) == ("turn", "node-0", "r1", True)
        assert (turn["prefetched_node"], turn["prefetched_s"], turn["source_nodes"]) == ("node-0", 8.0, ["node-1"])
        assert turn["scores"][1] == {"node": "node-1", "sum": 1.5, "terms": {"load_s": 0.5, "work_s": 1.0}}
        assert (turn["until_first_s"], turn["after_s"]) == ({"queue": 0.5, "load-ssd": 0.25}, {"decode": 2.0})
        assert (hint["until_first_s"], hint["after_s"]) == (None, None)
        assert (hint["what"], hint["worth"], hint["prefetched_node"], hint["request_id"]) == (
            "hint",
            "full",
            None,
            None,
        )
        status, body = await s.get("/v1/sessions/nobody/placement")
        assert (status, body["error"]["code"]) == (404, "placement_not_found")
        status, body = await s.get("/v1/sessions/../placement")
        assert status in (400, 404)


@pytest.mark.parametrize("server", [True, False])
async def test_only_a_server_key_hears_why(server: bool) -> None:
    async with stack(api_keys=KEYS, wait=False) as s:
        await until(lambda: len(s.gateway.parts.workers.connected) == 2)
        s.gateway.parts.keys = Keys([("key-of-acme", Caller("acme", server=server))])
        status, _, headers = await s.post("/v1/chat/completions", QUESTION, headers=ACME)
        assert status == 200 and ("X-Upbeat-Why" in headers) is server and headers["X-Upbeat-Node"]
        status, body = await s.get("/v1/sessions/chat-1/placement", headers=ACME)
        assert status == (200 if server else 403), body
        status, _ = await s.get("/v1/sessions/chat-1/placement")
        assert status == 401
