"""Hints as other systems spell them, each as its public documentation shows it, and what they come to."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_fakes import Stack, events, stack, until

from contracts.advisory import Advisory
from contracts.errors import InvalidRequest
from gateway.core.kv_hints import HintAction, due
from gateway.core.spellings import NOTHING, read
from gateway.sessions import stated


def session_of(headers: dict[str, str], body: dict[str, Any] | None = None) -> str | None:
    said = read(body or {}, headers)
    return stated(headers, (body or {}).get("session_id"), (body or {}).get("prompt_cache_key"), said.session_id)


def told(
    body: dict[str, Any], headers: dict[str, str] | None = None, own: str = "own"
) -> tuple[list[Advisory], list[str]]:
    """What is told after the answer; nothing may be due at once."""
    actions = read(body, headers or {}).actions
    assert due(actions, own, "m", 0, after=False) == ([], [])
    return due(actions, own, "m", 0, after=True)


# ---- sessions ------------------------------------------------------------------------------------------------------
def test_prompt_cache_key_names_the_session_after_everything_that_is_plainer() -> None:
    """https://platform.openai.com/docs/guides/prompt-caching"""
    assert session_of({}, {"prompt_cache_key": "support-bot:user-7"}) == "support-bot:user-7"
    assert session_of({}, {"prompt_cache_key": "k", "agent_hint": {"session_id": "worker-7"}}) == "worker-7"
    assert session_of({}, {"prompt_cache_key": "k", "session_id": "s", "litellm_session_id": "l"}) == "s"


def test_dynamos_session_header_names_a_reasoning_chain() -> None:
    """https://docs.nvidia.com/dynamo/dev/agents/identify-agent-sessions"""
    assert (
        session_of({"X-Dynamo-Session-Id": "report-9:writer", "X-Dynamo-Parent-Session-Id": "report-9"})
        == "report-9:writer"
    )


def test_dynamos_final_header_takes_the_hint_back() -> None:
    """https://docs.nvidia.com/dynamo/dev/agents/identify-agent-sessions"""
    assert told({}, {"X-Dynamo-Session-Final": "true"}) == ([], ["own"])
    assert told({}, {"X-Dynamo-Session-Final": "false"}) == ([], [])
    with pytest.raises(InvalidRequest) as e:
        read({}, {"X-Dynamo-Session-Final": "perhaps"})
    assert e.value.param == "X-Dynamo-Session-Final"


def test_claude_codes_headers_name_a_session_and_a_subagents_thread_in_it() -> None:
    """https://docs.rs/crate/dynamo-llm/1.6.0/source/src/protocols/agents.rs lists what Claude Code, Codex and OpenCode
    send."""
    session = "8f0e6a3c-8a1d-4a35-9f5b-0b8f7f3f2f11"
    assert session_of({"X-Claude-Code-Session-Id": session}) == session
    assert session_of({"X-Claude-Code-Session-Id": session, "X-Claude-Code-Agent-Id": "a41c"}) == f"{session}.a41c"
    with pytest.raises(InvalidRequest) as e:
        session_of({"X-Claude-Code-Session-Id": session, "X-Claude-Code-Agent-Id": "a/b"})
    assert e.value.param == "X-Claude-Code-Agent-Id"


@pytest.mark.parametrize(("thread", "session"), [("thread-id", "session-id"), ("thread_id", "session_id")])
def test_codexs_headers_name_a_thread_before_the_session_it_is_in(thread: str, session: str) -> None:
    """https://github.com/Lingtai-AI/lingtai-kernel/pull/435 (underscores),
    https://github.com/raine/claude-code-proxy/pull/156 (hyphens)"""
    # a server's headers have no case
    names = {n.lower(): n for n in ("Thread-Id", "Session-Id", "thread_id", "session_id")}
    assert session_of({names[session]: "s1"}) == "s1"
    assert session_of({names[session]: "s1", names[thread]: "t1"}) == "t1"


@pytest.mark.parametrize("header", ["X-Opencode-Session", "X-Session-Affinity", "X-Session-Id"])
def test_opencodes_headers_name_the_session(header: str) -> None:
    """https://github.com/coder/coder/pull/26140, https://github.com/diegosouzapw/OmniRoute/pull/4028"""
    assert session_of({header: "ses_6b2f0c"}) == "ses_6b2f0c"


def test_chat_uis_headers_name_the_chat_and_say_nothing_while_it_has_no_id() -> None:
    """https://github.com/open-webui/open-webui/discussions/23384 (Open WebUI),
    https://www.librechat.ai/docs/configuration/librechat_yaml/object_structure/shared_endpoint_settings (LibreChat)"""
    assert session_of({"X-OpenWebUI-Chat-Id": "3f1c", "X-OpenWebUI-User-Id": "u"}) == "3f1c"
    assert session_of({"X-Conversation-Id": "b6f2"}) == "b6f2"
    assert session_of({"X-Conversation-Id": ""}) is None


def test_litellm_names_the_session_in_a_header_or_in_the_body() -> None:
    """https://docs.litellm.ai/docs/proxy/ui_logs_sessions, https://docs.litellm.ai/docs/proxy/request_headers"""
    assert session_of({"X-LiteLLM-Session-Id": "run-1"}) == "run-1"
    assert session_of({}, {"litellm_session_id": "run-2"}) == "run-2"
    assert session_of({}, {"litellm_metadata": {"session_id": "run-3", "tags": ["x"]}}) == "run-3"
    assert session_of({}, {"metadata": {"session_id": "a label / with blanks"}}) is None


# ---- NVIDIA Dynamo -------------------------------------------------------------------------------------------------
def test_dynamos_agent_hints_become_a_priority_an_expected_length_and_an_advisory() -> None:
    """https://docs.nvidia.com/dynamo/latest/user-guides/agents/agent-hints"""
    body = {"nvext": {"agent_hints": {"priority": 7, "strict_priority": 2, "osl": 800, "speculative_prefill": True}}}
    said = read(body, {})
    assert (said.priority, said.expected_tokens) == (-7, 800)
    assert told(body) == ([Advisory("own", "m", ttl_s=60.0)], [])
    assert read(body, {"X-Dynamo-Request-Priority": "9"}).priority == -9
    assert read({"nvext": {"agent_hints": {"priority": 2**31 - 1}}}, {}).priority == -1000
    assert read({"nvext": {"agent_hints": {"latency_sensitivity": 2.6}}}, {}).priority == -3
    assert read({"nvext": {"agent_hints": {"latency_sensitivity": 2.6, "priority": -4}}}, {}).priority == 4


def test_dynamos_session_control_opens_keeps_and_closes() -> None:
    """https://github.com/ai-dynamo/dynamo/blob/main/docs/backends/sglang/agents.md,
    https://github.com/ai-dynamo/aiperf/pull/1101 (bind)"""

    def control(**fields: Any) -> dict[str, Any]:
        return {"nvext": {"session_control": {"session_id": "helper-3", **fields}}}

    assert session_of({}, control(action="open", timeout=90)) == "helper-3"
    assert told(control(action="open", timeout=90)) == ([Advisory("helper-3", "m", ttl_s=90.0)], [])
    assert told(control(action="bind")) == told(control()) == ([Advisory("helper-3", "m", ttl_s=300.0)], [])
    assert told(control(action="close")) == ([], ["helper-3"])


@pytest.mark.parametrize(
    ("ttl", "seconds"), [("5m", 300.0), ("1h", 3600.0), ("1s", 1.0), ("90", 90.0), (45, 45.0), (0, None)]
)
def test_dynamos_cache_control_is_an_advisory_of_that_length(ttl: Any, seconds: float | None) -> None:
    """https://github.com/ai-dynamo/dynamo/pull/6213"""
    body = {"nvext": {"cache_control": {"type": "ephemeral", "ttl": ttl}}}
    assert told(body) == ([Advisory("own", "m", ttl_s=seconds)] if seconds else [], [])


# ---- vLLM ----------------------------------------------------------------------------------------------------------
def test_vllms_agent_hint_protects_prefetches_and_lets_go() -> None:
    """https://github.com/vllm-project/vllm/issues/52113"""
    protect = {
        "session_id": "tester-2",
        "parent_session_id": "lead",
        "cache_control": {"type": "ephemeral", "ttl": 240},
    }
    assert session_of({}, {"agent_hint": protect}) == "tester-2"
    assert told({"agent_hint": protect}, own="tester-2") == ([Advisory("tester-2", "m", ttl_s=240.0)], [])
    assert told({"agent_hint": {"cache_control": {"type": "ephemeral"}}}) == ([Advisory("own", "m", ttl_s=300.0)], [])
    for kind in ("offload", "evict"):
        edits = {"manage_request": True, "edits": [{"type": kind, "block_start": 0, "block_end": 8}]}
        assert told({"agent_hint": {"session_id": "tester-2", "context_management": edits}}, own="tester-2") == (
            [],
            ["tester-2"],
        )
    fetched = {"session_id": "tester-2", "context_management": {"edits": [{"type": "prefetch"}]}}
    assert due(read({"agent_hint": fetched}, {}).actions, "another", "m", -1, after=False) == (
        [Advisory("tester-2", "m", priority=-1)],
        [],
    )


# ---- kv_hints ------------------------------------------------------------------------------------------------------
def envelope(*actions: tuple[str, dict[str, Any]], version: str = "0.1") -> dict[str, Any]:
    listed = [
        {"action_id": f"a{i}", "action_type": t, "action_version": "1.0", "payload": p}
        for i, (t, p) in enumerate(actions)
    ]
    return {"kv_hints": {"protocol_version": version, "message_id": "m-1", "actions": listed}}


def statuses(body: dict[str, Any], rejected: bool = False) -> list[str]:
    said = read(body, {}).envelope
    assert said is not None
    answer = said.answer(rejected)
    assert (answer["protocol_version"], answer["message_id"]) == (body["kv_hints"]["protocol_version"], "m-1")
    assert [r["action_id"] for r in answer["results"]] == [a["action_id"] for a in body["kv_hints"]["actions"]]
    return [r["status"] for r in answer["results"]]


def test_kv_hints_are_told_and_answered_action_by_action() -> None:
    """https://github.com/sgl-project/sglang/issues/36224, https://github.com/vllm-project/vllm/issues/53421"""
    body = envelope(
        ("kv.retain", {"ttl_seconds": 120}), ("kv.prefetch", {"session_id": "planner"}), ("kv.demote",
        {"session_id": "scout"}),
        ("kv.fetch", {"source": "x"}), ("kv.dream", {"anything": 1}),
    )  # fmt: skip
    assert statuses(body) == ["accepted", "accepted", "accepted", "unsupported", "ignored"]
    assert statuses(body, rejected=True) == ["rejected", "rejected", "rejected", "unsupported", "ignored"]
    actions = read(body, {}).actions
    assert due(actions, "own", "m", 0, after=False) == ([Advisory("planner", "m")], [])
    assert due(actions, "own", "m", 0, after=True) == ([Advisory("own", "m", ttl_s=120.0)], ["scout"])


def test_an_envelope_of_another_major_version_does_nothing_and_says_so() -> None:
    """https://github.com/sgl-project/sglang/pull/38595"""
    body = envelope(("kv.retain", {}), version="1.0")
    assert statuses(body) == ["unsupported"] and read(body, {}).actions == ()


def test_a_session_is_told_of_once() -> None:
    actions = [HintAction("advise", after=True, ttl_s=t) for t in (5.0, 50.0, 20.0)]
    assert due(actions, "s", "m", 2, after=True) == ([Advisory("s", "m", priority=2, ttl_s=50.0)], [])
    assert due([*actions, HintAction("withdraw", after=True, session_id="s")], "s", "m", 0, after=True) == ([], ["s"])


# ---- what is wrong, and what is nobody's business ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"nvext": "x"}, "nvext"),
        ({"nvext": {"agent_hints": []}}, "nvext.agent_hints"),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"priority": True}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"latency_sensitivity": 10**400}}}, "nvext.agent_hints.latency_sensitivity"),
        ({"nvext": {"agent_hints": {"osl": -1}}}, "nvext.agent_hints.osl"),
        ({"nvext": {"agent_hints": {"speculative_prefill": 1}}}, "nvext.agent_hints.speculative_prefill"),
        ({"nvext": {"session_control": {"session_id": "a/b"}}}, "nvext.session_control.session_id"),
        ({"nvext": {"session_control": {"action": "open"}}}, "nvext.session_control.session_id"),
        ({"nvext": {"session_control": {"session_id": "a", "action": "pause"}}}, "nvext.session_control.action"),
        ({"nvext": {"session_control": {"session_id": "a", "timeout": 90_000}}}, "nvext.session_control.timeout"),
        ({"nvext": {"cache_control": {"ttl": "soon"}}}, "nvext.cache_control.ttl"),
        ({"nvext": {"cache_control": {"ttl": "9999999h"}}}, "nvext.cache_control.ttl"),
        ({"agent_hint": {"cache_control": {"type": "forever"}}}, "agent_hint.cache_control.type"),
        ({"agent_hint": {"cache_control": {"ttl": float("nan")}}}, "agent_hint.cache_control.ttl"),
        (
            {"agent_hint": {"context_management": {"edits": [{"type": "melt"}]}}},
            "agent_hint.context_management.edits[0].type",
        ),
        ({"agent_hint": {"context_management": {"edits": [7]}}}, "agent_hint.context_management.edits[0]"),
        ({"litellm_session_id": "a b"}, "litellm_session_id"),
        ({"kv_hints": []}, "kv_hints"),
        ({"kv_hints": {}}, "kv_hints.protocol_version"),
        ({"kv_hints": {"protocol_version": "0.1"}}, "kv_hints.actions"),
        (
            {"kv_hints": {"protocol_version": "0.1", "actions": [{"action_type": "kv.pin"}]}},
            "kv_hints.actions[0].action_id",
        ),
        (envelope(("kv.pin", {"session_id": ".."})), "kv_hints.actions[0].payload.session_id"),
        (envelope(("kv.pin", {"ttl_seconds": -1})), "kv_hints.actions[0].payload.ttl_seconds"),
        ({"kv_hints": {"protocol_version": "0.1", "actions": [{}] * 65}}, "kv_hints.actions"),
    ],
)
def test_a_wrong_value_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as e:
        read(body, {})
    assert (e.value.status, e.value.param) == (400, param)


def test_what_others_have_in_their_extensions_is_ignored() -> None:
    assert (
        read(
            {"nvext": {"router": {"ttft_target": 5}, "agent_hints": {"iat": 3, "priority": None}}, "agent_hint": None},
            {},
        )
        == NOTHING
    )
    assert read({"model": "m", "messages": []}, {"Accept": "*/*"}) is NOTHING


# ---- through the gateway -------------------------------------------------------------------------------------------
@pytest.fixture
async def s() -> Any:
    async with stack(1) as running:
        yield running


async def test_a_requests_hints_reach_the_worker_and_the_scheduler(s: Stack) -> None:
    nvext = {
        "agent_hints": {"priority": 4, "osl": 12},
        "session_control": {"session_id": "sub-9", "action": "open", "timeout": 30},
    }
    status, body, headers = await s.chat(
        nvext=nvext, **envelope(("kv.prefetch", {"session_id": "next"}), ("kv.new", {}))
    )
    assert (status, headers["X-Session-Id"]) == (200, "sub-9")
    assert [r["status"] for r in body["kv_hints"]["results"]] == ["accepted", "ignored"]
    request = s.workers[0].submitted[0]
    assert (request.session_id, request.priority, request.expected_tokens) == ("sub-9", -4, 12)
    await until(lambda: len(s.scheduler.advised) == 2)
    assert [(a.session.session_id, a.ttl_s, a.priority) for a in s.scheduler.advised] == [
        ("next", 60.0, -4),
        ("sub-9", 30.0, -4),
    ]
    await s.chat(nvext={"session_control": {"session_id": "sub-9", "action": "close"}})
    await until(lambda: bool(s.scheduler.invalidated))
    assert s.scheduler.invalidated[0].session.session_id == "sub-9"
    assert (await s.chat(priority=3, nvext=nvext))[0] == 200 and s.workers[0].submitted[-1].priority == 3


async def test_a_stream_says_what_became_of_its_kv_hints_where_choice_0_ends(s: Stack) -> None:
    for path, prompt in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        sent = {"model": "toy", "stream": True, "n": 2, **prompt, **envelope(("kv.retain", {}))}
        async with s.http.post(s.url + path, json=sent) as r:
            chunks = await events(r)
        said = [c for c in chunks if c != "[DONE]" and "kv_hints" in c]
        assert len(said) == 1 and said[0]["kv_hints"]["results"][0]["status"] == "accepted"
        assert said[0]["choices"][0]["index"] == 0 and said[0]["choices"][0]["finish_reason"]


async def test_a_wrong_hint_is_a_400_that_names_it(s: Stack) -> None:
    status, body, _ = await s.chat(nvext={"agent_hints": {"osl": "long"}})
    assert (status, body["error"]["param"]) == (400, "nvext.agent_hints.osl")


async def test_hints_over_the_limit_are_dropped_and_the_request_goes_on() -> None:
    async with stack(1, max_advisories_per_s=1) as s:
        answers = [
            (await s.chat(session_id="own", **envelope(("kv.retain", {}), ("kv.new", {}))))[:2] for _ in range(3)
        ]
        assert [status for status, _ in answers] == [200] * 3
        seen = [[r["status"] for r in body["kv_hints"]["results"]] for _, body in answers]
        assert seen[0] == ["accepted", "ignored"] and ["rejected", "ignored"] in seen
