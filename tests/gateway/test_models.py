"""The models that a gateway knows: what `/v1/models` says of them, and what requests for each are told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from gateway_fakes import MODEL, QUICK, Stack, stack, until
from security_harness import KEY_A

from contracts.models import ModelState
from contracts.request import GenerateRequest, Sampling
from contracts.v1 import scheduler_pb2 as pb
from gateway.core.quarantine import digest
from gateway.core.registry import Registered, described, names
from gateway.core.routing import FleetView, Model, ModelThere, NodeView, direct_route
from gateway.fleet import fleet_from_wire

SMALL = Registered(ttft_s=0.5, engine="native", priority=3, pinned=True)


def node(number: int, state: ModelState, *, serving: bool = True, **there: Any) -> NodeView:
    active = frozenset({"small"}) if state is ModelState.ACTIVE else frozenset[str]()
    of_node = {"there": (ModelThere("small", state, **there),), "state": "serving" if serving else "draining"}
    return NodeView(f"node-{number}", f"a{number}", serving, active, **of_node)


def shown(*nodes: NodeView) -> dict[str, Any]:
    seen = {"small": Model("small", 4096, 7, weight_bytes=100, ttft_slo_s=9.0, engine="native", layers=24)}
    return described("small", {"small": SMALL}, seen, FleetView(nodes))


def test_registered_models_come_in_the_configurations_order_and_then_what_nodes_have_had() -> None:
    assert names(["small", "large"], ["large", "old", "early"]) == ["small", "large", "early", "old"]


@pytest.mark.parametrize(
    ("nodes", "state"),
    [
        ((), "cold"),
        ((node(0, ModelState.COLD), node(1, ModelState.ACTIVE)), "active"),
        ((node(0, ModelState.COLD), node(1, ModelState.LOADING)), "loading"),
        ((node(0, ModelState.ACTIVE, serving=False),), "cold"),
    ],
)
def test_a_model_is_in_the_best_state_that_a_serving_node_has_it_in(nodes: tuple[NodeView, ...], state: str) -> None:
    assert shown(*nodes)["state"] == state


def test_a_model_is_shown_with_its_nodes_its_sizes_and_its_objectives() -> None:
    model = shown(
        node(
            0,
            ModelState.ACTIVE,
            running=2,
            kv_bytes_used=3,
            kv_bytes_cached=1,
            kv_bytes_limit=4,
            idle_s=7.5,
            layers_lent=2,
        ),
        node(1, ModelState.ACTIVE, serving=False),
    )
    assert (model["max_model_len"], model["created"], model["weight_bytes"], model["engine"]) == (
        4096,
        7,
        100,
        "native",
    )
    assert model["layers"] == 24
    assert (model["ttft_slo_s"], model["tpot_slo_s"]) == (0.5, 0.0), "the configuration's word counts"
    assert model["nodes"][0] == {
        "node": "node-0", "state": "active", "running": 2, "waiting": 0, "kv_bytes_used": 3, "kv_bytes_cached": 1,
        "kv_bytes_limit": 4, "layers_lent": 2, "idle_s": 7.5, "activation_s": 0.0,
    }  # fmt: skip
    assert model["nodes"][1]["state"] == "draining"
    assert (model["priority"], model["pinned"]) == (3, True)


def test_one_that_was_never_seen_is_shown_all_the_same() -> None:
    model = described("small", {"small": SMALL}, {}, None)
    assert (model["id"], model["state"], model["nodes"], model["created"]) == ("small", "cold", [], 0)


def test_without_a_scheduler_a_request_goes_to_a_node_that_has_its_model_active() -> None:
    view = FleetView((node(0, ModelState.COLD), node(1, ModelState.ACTIVE)))
    route = direct_route(view, "small", {}, {"node-0", "node-1"})
    assert route is not None and route.node == "node-1"
    assert direct_route(FleetView((node(0, ModelState.COLD),)), "small", {}, {"node-0"}) is None


def test_the_fleet_says_of_each_model_how_it_is_on_each_node() -> None:
    info = pb.ModelInfo(name="small", state=pb.MODEL_STATE_ACTIVE)
    load = pb.ModelLoad(
        model="small", state=pb.MODEL_STATE_LOADING, running=1, kv_bytes_used=5, kv_bytes_cached=7, kv_bytes_limit=6
    )
    old = pb.FleetNode(node="node-1", serving=True, models=[pb.ModelInfo(name="small")])
    view = fleet_from_wire(
        pb.Fleet(nodes=[pb.FleetNode(node="node-0", serving=True, models=[info], loads=[load]), old])
    )
    assert view.nodes[0].there == (ModelThere("small", ModelState.LOADING, 1, 0, 5, 7, 6),) and not view.nodes[0].able(
        "small"
    )
    assert view.nodes[1].able("small"), "a worker that names a model and says no more has it active"


async def test_registered_models_are_listed_and_only_others_do_not_exist() -> None:
    two = {MODEL: {"path": "/m/toy", "nodes": [0], "tpot_s": 0.25}, "asleep": {"path": "/m/asleep", "nodes": [1]}}
    async with stack(2, models=two, retry_limits=replace(QUICK, total_s=0.3), asleep={"node-1": ["asleep"]}) as s:
        status, listed = await s.get("/v1/models")
        assert status == 200 and [(m["id"], m["state"]) for m in listed["data"]] == [
            (MODEL, "active"),
            ("asleep", "cold"),
        ]
        assert listed["data"][0]["tpot_slo_s"] == 0.25 and [n["node"] for n in listed["data"][0]["nodes"]] == [
            "node-0",
            "node-1",
        ]
        assert (await s.get("/v1/models/asleep"))[1]["state"] == "cold" and (await s.get("/v1/models/other"))[0] == 404
        assert (await s.chat())[0] == 200
        status, answer, headers = await s.chat(model="asleep")
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "unavailable", "1")
        status, answer, _ = await s.chat(model="other")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_gateway_is_ready_while_each_of_its_models_has_a_node_that_serves_or_can_wake_it() -> None:
    two = {MODEL: {"path": "/m/toy"}, "asleep": {"path": "/m/asleep", "nodes": [1]}}
    async with stack(2, models=two, asleep={"node-1": ["asleep"]}) as s:
        assert (await s.get("/ready"))[0] == 200
        s.scheduler.set_absent("node-0")
        await until(lambda: lacks(s, "node-0 does not serve"))
        assert (await s.get("/ready"))[0] == 200, f"node-1 serves {MODEL} too"
        s.scheduler.set_absent("node-1")
        await until(lambda: lacks(s, "node-1 does not serve"))
        status, answer = await s.get("/ready")
        assert (status, answer["missing"]) == (503, [f"no node serves asleep (served: {MODEL})"])
        assert (await s.chat())[0] == 200, "and the other model goes on"


async def lacks(s: Stack, why: str) -> bool:
    return why in await s.missing()


async def test_the_fleet_shows_who_holds_each_devices_memory_and_which_models_wake() -> None:
    async with stack(2, asleep={"node-0": ["asleep"]}) as s:
        assert (await s.get("/v1/fleet"))[1]["nodes"][0]["memory"] == [], "its worker does not say"
        told = [("", "free", 5), ("kv", "a", 1), ("weights", "a", 2), ("weights", "b", 3), ("", "warm", 4)]
        shares = [pb.MemoryShare(use=use or name, name=name if use else "", bytes=n) for use, name, n in told]
        loads = [
            pb.ModelLoad(
                model="asleep", state=pb.MODEL_STATE_LOADING, waiting=1, idle_s=2.0, activation_s=0.5, layers_lent=3
            )
        ]
        s.scheduler.model.shape.layers = 24
        s.scheduler.set_memory("node-0", shares, loads)
        await until(lambda: shows_memory(s))
        node = (await s.get("/v1/fleet"))[1]["nodes"][0]
        assert [tuple(share.values()) for share in node["memory"]] == [
            ("weights", "b", 3), ("weights", "a", 2), ("kv", "a", 1), ("warm", "", 4), ("free", "", 5),
        ]  # fmt: skip
        waking = node["models"][1]
        told = [waking[key] for key in ("name", "state", "waiting", "activation_s", "layers_lent")]
        assert told == ["asleep", "loading", 1, 0.5, 3]
        assert node["models"][0]["layers"] == (await s.get(f"/v1/models/{MODEL}"))[1]["layers"] == 24


async def shows_memory(s: Stack) -> bool:
    return bool((await s.get("/v1/fleet"))[1]["nodes"][0]["memory"])


async def test_why_a_models_weights_came_and_went_is_told_latest_first_and_only_of_known_models() -> None:
    two = {MODEL: {"path": "/m"}, "x/placement": {"path": "/m"}}
    async with stack(1, models=two, asleep={"node-0": ["x/placement"]}) as s:
        status, told = await s.get(f"/v1/models/{MODEL}/placement")
        assert status == 200 and told["object"] == "model.placement"
        assert [(m["state"], m["why"], m["other"]) for m in told["nodes"][0]["moves"]] == [
            ("cold", "for_kv", "big"),
            ("active", "loaded", None),
            ("loading", "request", None),
        ]
        assert [m["layers_lent"] for m in told["nodes"][0]["moves"]] == [0, 0, 0]
        assert [told["nodes"][0][key] for key in ("layers", "layers_lent", "may_lend")] == [24, 2, {
            "idle": 12, "computing": 3, "transfer_s": 0.5, "layer_s": 0.25, "never": None,
        }]  # fmt: skip
        assert told["nodes"][1]["may_lend"] is None
        assert (await s.get("/v1/models/other/placement"))[0] == 404
        assert (await s.get("/v1/models/x/placement"))[1]["id"] == "x/placement", "a model's own name goes before"


async def test_a_model_is_removed_for_the_tenant_of_a_server_key_with_openais_client() -> None:
    async with stack(api_keys=[{"key": KEY_A, "tenant": "a"}]) as s:
        client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key=KEY_A, max_retries=0)
        gone = await client.models.delete("base:with/any-name")
        assert (gone.id, gone.object, gone.deleted) == ("base:with/any-name", "model", True)
        assert s.scheduler.removed == [("a", "base:with/any-name")]
        await client.close()
        async with s.http.delete(f"{s.url}/v1/models/x") as r:
            assert r.status == 401


async def test_a_model_that_no_node_of_a_whole_fleet_has_any_more_is_forgotten() -> None:
    async with stack(asleep={"node-0": ["base:tuned"]}) as s:
        fleet = s.gateway.parts.fleet
        assert (await s.get("/v1/models/base:tuned"))[0] == 200
        s.scheduler.asleep.clear()
        s.scheduler.set_absent("node-0")
        await until(lambda: not fleet.view.nodes[0].serving)
        assert (await s.get("/v1/models/base:tuned"))[0] == 200, "its node may come back with it"
        s.scheduler.set_absent()
        await until(lambda: not fleet.knows_model("base:tuned"))
        assert (await s.get("/v1/models/base:tuned"))[0] == 404


WITH_ADAPTERS = {MODEL: {"path": "/m/toy", "ttft_s": 9.0, "adapters": {"support": "/a/s", f"{MODEL}:law": "/a/l"}}}


async def test_adapters_are_listed_with_their_parent_and_state_behind_the_models() -> None:
    async with stack(1, models=WITH_ADAPTERS) as s:
        listed = (await s.get("/v1/models"))[1]["data"]
        assert [(m["id"], m.get("parent"), m["state"]) for m in listed] == [
            (MODEL, None, "active"),
            ("support", MODEL, "active"),
            (f"{MODEL}:law", MODEL, "active"),
        ]
        assert {m["max_model_len"] for m in listed} == {listed[0]["max_model_len"]} and "nodes" not in listed[1]
        assert (await s.get("/v1/models/support"))[1] == listed[1]
        assert (await s.get("/v1/models/support/placement"))[1]["id"] == "support"
        client = openai.AsyncOpenAI(base_url=f"{s.url}/v1", api_key="none", max_retries=0)
        assert [m.id async for m in client.models.list()] == [m["id"] for m in listed]
        await client.close()


async def test_a_request_for_an_adapter_is_placed_as_its_models_and_told_to_the_worker() -> None:
    async with stack(1, models=WITH_ADAPTERS) as s:
        for name in ("support", f"{MODEL}:law", MODEL):
            status, answer, _ = await s.chat(model=name)
            assert status == 200 and answer["model"] == name
        [worker] = s.workers
        assert [(r.model, r.adapter) for r in worker.submitted] == [
            (MODEL, "support"),
            (MODEL, f"{MODEL}:law"),
            (MODEL, ""),
        ]
        sessions = {r.session_id for r in worker.submitted}
        assert len(sessions) == 3, "a conversation with an adapter is not its base's"
        status, answer, _ = await s.post("/v1/completions", {"model": "support", "prompt": "a", "max_tokens": 1})
        assert (status, worker.submitted[-1].adapter) == (200, "support")
        status, answer, _ = await s.post("/tokenize", {"model": "support", "prompt": "a"})
        assert status == 200
        status, answer, _ = await s.chat(model="suppor")
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_hint_that_names_an_adapter_is_one_for_its_model() -> None:
    async with stack(1, models=WITH_ADAPTERS) as s:
        status, _, _ = await s.post("/v1/advisory", {"session_id": "c-1", "model_id": "support"})
        assert status == 202
        await until(lambda: bool(s.scheduler.advised))
        assert s.scheduler.advised[0].model_id == MODEL


async def test_requests_for_two_adapters_are_two_for_the_quarantine() -> None:
    request = GenerateRequest("r", "t", "s", MODEL, Sampling(), prompt="a", adapter="support")
    assert digest(request) == digest(replace(request, request_id="r2", session_id="s2"))
    assert len({digest(request), digest(replace(request, adapter="law")), digest(replace(request, adapter=""))}) == 3
