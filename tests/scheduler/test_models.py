"""Several models in one fleet: who has which, and where turns, hints and figures of each belong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from contracts.convert import shape_to_wire
from contracts.errors import InvalidRequest, NotFound, Unavailable
from contracts.ids import SessionKey
from contracts.models import ModelState, ModelWire
from contracts.residency import MOST_MOVES, MOST_SHARES
from contracts.v1 import scheduler_pb2 as pb
from scheduler.convert import (
    load_from_wire,
    loads_to_wire,
    memory_to_wire,
    model_explanation,
    model_to_wire,
    models_from_wire,
    moves_from_wire,
)
from scheduler.core import snapshot, terms
from scheduler.core.commands import Wake
from scheduler.core.control import Ask, Command, Control, Prefetch, Settings
from scheduler.core.directory import Held
from scheduler.core.fleet import LoadReport
from scheduler.core.models import ModelLoad
from scheduler.core.snapshot import PlacementRequest, Snapshot
from tests.scheduler.test_core import MODEL, S, hint

A, B = replace(MODEL, name="a"), replace(MODEL, name="b", shape=replace(MODEL.shape, layers=12))
ROWS = np.arange(3)


class Mixed(Control):
    """node-0 and node-1 have a, node-2 has b, at time 0; a, b and c are registered."""

    def __init__(self) -> None:
        super().__init__(Settings(models=("a", "b", "c")))
        for i, model in enumerate((A, A, B)):
            self.fleet.worker_joined(f"node-{i}", f"w{i}", (model,), 0.0)
            self.fleet.store_joined(f"node-{i}", f"s{i}")

    def see(self, model: str, session: SessionKey = S) -> Snapshot:
        return snapshot.take(self.fleet, self.directory.get(session), model, 0.0)

    def asks(self, model: str, session: SessionKey = S, **more: Any) -> str:
        return self.place(Ask(f"{model}-{session}-{self.decisions}", session, model, **more), 0.0).node

    def hinted(self, session: SessionKey = S, model: str = "") -> list[Command]:
        return self.advise(hint(session, f"hint-{session}", model=model), 0.0)


def test_a_turn_goes_to_a_node_of_its_model_whatever_the_others_have_to_do() -> None:
    h = Mixed()
    h.fleet.loaded("node-2", LoadReport(outstanding_s=100.0), [], [], 0.0)
    assert {h.asks("a", SessionKey("t", f"s{n}")) for n in range(20)} == {"node-0", "node-1"}
    assert {h.asks("b", SessionKey("t", f"s{n}")) for n in range(20)} == {"node-2"}
    h.validate()


def test_a_registered_model_that_nobody_has_is_not_active_and_any_other_does_not_exist() -> None:
    h = Mixed()
    with pytest.raises(Unavailable, match="no node has the model 'c' active"):
        h.asks("c")
    with pytest.raises(NotFound, match="'d' does not exist here"):
        h.asks("d")
    with pytest.raises(NotFound, match="node-2 does not serve the model 'a'"):
        h.asks("a", pin="node-2")
    h.worker_left("node-2", 0.0)
    with pytest.raises(Unavailable, match="'b' active"):
        h.asks("b")


@pytest.mark.parametrize("state", [ModelState.COLD, ModelState.LOADING, ModelState.DRAINING])
def test_a_node_that_does_not_have_the_model_active_gets_none_of_its_turns(state: ModelState) -> None:
    h = Mixed()
    h.fleet.loaded("node-0", LoadReport(models={"a": ModelLoad(state)}), [], [], 0.0)
    assert {h.asks("a", SessionKey("t", f"s{n}")) for n in range(10)} == {"node-1"}
    h.fleet.loaded("node-0", LoadReport(), [], [], 0.0)
    assert "node-0" in {h.asks("a", SessionKey("t", f"s{n}")) for n in range(10)}


def test_a_worker_that_comes_back_with_another_model_no_longer_has_the_first() -> None:
    h = Mixed()
    h.fleet.worker_joined("node-0", "w0", (B,), 1.0)
    assert {h.asks("a", SessionKey("t", f"s{n}")) for n in range(5)} == {"node-1"}
    assert h.see("b").serves.tolist() == [True, False, True]
    h.validate()


def test_memory_and_pace_are_a_models_own_on_each_node_and_in_bytes() -> None:
    h = Mixed()
    own = ModelLoad(request_s=0.5, prefill_token_s=0.25, kv_bytes_used=300, kv_bytes_limit=1000)
    h.fleet.loaded("node-0", LoadReport(hbm_pages_total=7, hbm_pages_free=7, models={"a": own}), [], [], 0.0)
    h.fleet.loaded("node-2", LoadReport(hbm_pages_total=7, hbm_pages_free=3, prefill_token_s=2.0), [], [], 0.0)
    of_a, of_b = h.see("a"), h.see("b")
    assert of_a.kv_total_bytes.tolist() == [1000.0, 0.0, 0.0] and of_a.kv_free_bytes.tolist() == [700.0, 0.0, 0.0]
    assert of_a.prefill_token_s.tolist() == [0.25, np.inf, np.inf]
    page = B.shape.piece_bytes
    assert of_b.kv_free_bytes.tolist() == [0.0, 0.0, 3.0 * page], "a worker that tells of one model alone"
    assert of_b.prefill_token_s.tolist() == [np.inf, np.inf, 2.0]
    assert of_a.serves.tolist() == [True, True, False] and of_b.serves.tolist() == [False, False, True]


def test_a_placement_is_as_much_work_as_a_request_of_its_model() -> None:
    h = Mixed()
    h.fleet.loaded("node-0", LoadReport(models={"a": ModelLoad(request_s=4.0)}), [], [], 0.0)
    h.fleet.loaded("node-2", LoadReport(models={"b": ModelLoad(request_s=0.25)}), [], [], 0.0)
    for node, model in (("node-0", "a"), ("node-2", "b")):
        h.fleet.placed(node, f"r-{model}", 0.0, model=model)
    a_s, b_s = (h.fleet.request_s_of(model) for model in "ab")
    assert terms.work_s(h.see("a"), PlacementRequest("a"), ROWS).tolist() == [a_s, 0.0, b_s] and a_s > 1.0 > b_s, (
        "running means of what is reported"
    )
    h.validate()


def test_a_session_has_nothing_to_load_for_a_model_that_it_has_not_spoken_to() -> None:
    h = Mixed()
    h.directory.report("node-0", S, "a", 960, 1.0, Held(960, 960, 960))
    assert h.see("a").cached.bytes == 15 * A.shape.chunk_bytes and h.see("b").cached.bytes == 0.0


def test_a_hint_goes_to_a_node_of_the_model_that_it_names() -> None:
    h = Mixed()
    (command,) = h.hinted(model="b")
    assert isinstance(command, Prefetch) and (command.node, command.hint.model) == ("node-2", "b")


def test_a_hint_without_a_model_is_for_the_sessions_last_one() -> None:
    h = Mixed()
    h.directory.report("node-0", S, "a", 960, 1.0, Held(960, 960, 960))
    (command,) = h.hinted()
    assert isinstance(command, Prefetch) and command.hint.model == "a"
    other = SessionKey("t", "asked")
    h.asks("a", other)
    h.asks("b", other)
    (command,) = h.hinted(other)
    assert isinstance(command, Prefetch) and (command.node, command.hint.model) == ("node-2", "b"), "its last turn's"


def test_a_hint_of_a_session_that_nobody_knows_is_of_use_only_where_there_is_one_model() -> None:
    h = Mixed()
    assert h.hinted() == []
    h.validate()
    one = Control(Settings(models=("a",)))
    one.fleet.worker_joined("node-0", "w0", (A,), 0.0)
    one.fleet.store_joined("node-0", "s0")
    (command,) = one.advise(hint(model=""), 0.0)
    assert isinstance(command, Prefetch) and command.hint.model == "a"


def test_a_report_is_read_and_told_to_gateways_by_model() -> None:
    wire = pb.ModelLoad(
        model="a", state=pb.MODEL_STATE_LOADING, running=1, waiting=2, outstanding_by_priority={3: 0.5}, request_s=0.25,
        kv_bytes_used=3, kv_bytes_cached=10, kv_bytes_limit=4, layers_lent=5, idle_s=6.0, activation_s=7.0,
        token_rate=8.0, may_lend=pb.MayLend(idle=5, computing=2, transfer_s=0.5, layer_s=0.25),
    )  # fmt: skip
    h = Mixed()
    h.fleet.loaded("node-0", load_from_wire(pb.WorkerLoad(models=[wire], device_bytes_free=9)), [], [], 0.0)
    node = h.fleet.devices["node-0"]
    assert loads_to_wire(node) == [wire] and node.load.device_bytes_free == 9
    shape = shape_to_wire(A.shape)
    info = pb.ModelInfo(
        name="a", shape=shape, weight_bytes=5, ttft_slo_s=0.5, tpot_slo_s=0.25, engine="native", max_tokens=10
    )
    (model,) = models_from_wire(pb.WorkerHello(node="node-0", models=[info]), {})
    told = model_to_wire(model, ModelState.LOADING)
    assert (told.weight_bytes, told.ttft_slo_s, told.engine, told.state) == (5, 0.5, "native", pb.MODEL_STATE_LOADING)
    assert model.state is ModelState.ACTIVE, "one that says no state"


def test_who_holds_a_devices_memory_is_told_to_gateways_and_no_more_owners_than_can_be() -> None:
    h = Mixed()
    shares = [pb.MemoryShare(use="weights", name="a", bytes=5), pb.MemoryShare(use="free", bytes=4)]
    h.fleet.loaded("node-0", load_from_wire(pb.WorkerLoad(memory=shares)), [], [], 0.0)
    assert memory_to_wire(h.fleet.devices["node-0"]) == shares
    assert len(load_from_wire(pb.WorkerLoad(memory=shares * 1000)).memory) == MOST_SHARES


def test_why_a_models_weights_moved_is_remembered_of_devices_that_have_it_while_their_worker_is_here() -> None:
    h = Mixed()
    device = h.fleet.devices["node-0"]
    sent = [
        pb.WeightsMove(model="a", ago_s=3.0, state=pb.MODEL_STATE_COLD, why="for_kv", other="b", seconds=9.0),
        pb.WeightsMove(model="a", ago_s=2.0, state=pb.MODEL_STATE_LOADING, why="of a later version"),
        pb.WeightsMove(model="a", ago_s=float("nan"), state=pb.MODEL_STATE_LOADING, why="hint"),
        pb.WeightsMove(model="a", ago_s=-5.0, state=pb.MODEL_STATE_ACTIVE, why="lent", seconds=0.5, layers_lent=7),
    ]
    device.moves = moves_from_wire(pb.WeightsMoves(moves=sent), 10.0)
    told = model_explanation("a", h.fleet.devices.values(), 12.0).devices
    on = {one.node: [(m.why, m.other, m.ago_s, m.seconds, m.layers_lent) for m in one.moves] for one in told}
    assert on["node-0"] == [("for_kv", "b", 5.0, 9.0, 0), ("lent", "", 2.0, 0.5, 7)]
    assert all(not moves for node, moves in on.items() if node != "node-0")
    many = moves_from_wire(pb.WeightsMoves(moves=sent[:1] * 1000), 10.0)
    assert len(many["a"]) == MOST_MOVES
    h.fleet.worker_left("node-0", 13.0)
    assert "node-0" not in [one.node for one in model_explanation("a", h.fleet.devices.values(), 14.0).devices]
    h.fleet.worker_joined("node-0", "w0", device.models, 15.0)
    assert not device.moves, "of another life"


def test_what_a_model_lends_is_told_with_its_layers_and_nothing_that_is_no_number() -> None:
    h = Mixed()
    may = pb.MayLend(idle=5, computing=2, transfer_s=0.5, layer_s=0.25)
    never = pb.MayLend(never="no_image")
    strange = [pb.MayLend(transfer_s=float("nan")), pb.MayLend(layer_s=-1.0), pb.MayLend(never="of a later version")]
    for told, kept in ((may, may), (never, never), *((each, None) for each in strange), (None, None)):
        load = pb.ModelLoad(model="a", layers_lent=2, may_lend=told)
        h.fleet.loaded("node-0", load_from_wire(pb.WorkerLoad(models=[load])), [], [], 0.0)
        one = next(d for d in model_explanation("a", h.fleet.devices.values(), 1.0).devices if d.node == "node-0")
        assert (one.layers, one.layers_lent) == (A.shape.layers, 2)
        assert (one.may_lend if one.HasField("may_lend") else None) == kept


def test_a_model_whose_pieces_can_have_no_such_size_is_refused_by_name() -> None:
    info = pb.ModelInfo(name="a", shape=shape_to_wire(replace(A.shape, piece_bytes=1 << 40)))
    with pytest.raises(InvalidRequest, match=r"node-0's model 'a': piece_bytes = 1099511627776"):
        models_from_wire(pb.WorkerHello(node="node-0", models=[info]), {})


def test_a_model_keeps_the_wire_that_its_worker_names() -> None:
    info = pb.ModelInfo(name="a", shape=shape_to_wire(A.shape), wire=pb.MODEL_WIRE_HTTP)
    (model,) = models_from_wire(pb.WorkerHello(node="node-0", models=[info]), {"b": ModelWire.FRAMES})
    assert model.wire is ModelWire.HTTP and model_to_wire(model, ModelState.ACTIVE).wire == pb.MODEL_WIRE_HTTP


def test_an_unknown_wire_is_refused_by_name() -> None:
    info = pb.ModelInfo(name="a", shape=shape_to_wire(A.shape))
    info.wire = 7  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"node-0 registers the model 'a' with wire = 7.*same version"):
        models_from_wire(pb.WorkerHello(node="node-0", models=[info]), {})


def test_a_model_has_one_wire_in_a_fleet() -> None:
    info = pb.ModelInfo(name="a", shape=shape_to_wire(A.shape), wire=pb.MODEL_WIRE_HTTP)
    with pytest.raises(
        InvalidRequest, match=r"node-0 serves the model 'a' with a server of its own HTTP.*another name"
    ):
        models_from_wire(pb.WorkerHello(node="node-0", models=[info]), {"a": ModelWire.FRAMES})


def test_a_hint_for_a_cold_model_wakes_it_even_if_its_session_has_no_cache() -> None:
    h = Mixed()
    cold = LoadReport(models={"b": ModelLoad(ModelState.COLD, activation_s=0.5)})
    assert not [c for c in h.hinted(SessionKey("t", "warm"), "b") if isinstance(c, Wake)]
    h.fleet.loaded("node-2", cold, [], [], 0.0)
    told = h.advise(replace(hint(SessionKey("t", "new"), "a9", model="b"), arrival_s=3.0, expires_s=9.0), 1.0)
    assert [c for c in told if isinstance(c, Wake)] == [Wake("node-2", "b", 3.0, 9.0)]
    told = h.advise(replace(hint(SessionKey("t", "newer"), "a10", model="b"), arrival_s=None, expires_s=9.0), 1.0)
    assert [c for c in told if isinstance(c, Wake)] == [Wake("node-2", "b", 1.0, 9.0)], "it types now"


def test_a_further_copy_of_a_model_must_be_worth_it() -> None:
    control = Control(Settings(models=("a", "b")))
    for n in range(2):
        control.fleet.worker_joined(f"node-{n}", f"w{n}", (A, B), 0.0)
        control.fleet.store_joined(f"node-{n}", f"s{n}")
        cold = {name: ModelLoad(ModelState.COLD, activation_s=0.5, request_s=0.1) for name in "ab"}
        control.fleet.loaded(f"node-{n}", LoadReport(models=cold), [], [], 0.0)
    asked = [control.place(Ask(f"r{n}", SessionKey("t", f"s{n}"), "a"), 0.0).node for n in range(5)]
    assert len(set(asked)) == 1, "the first request wakes it, before the device has said so"
    here = asked[0]
    for seconds, same in ((5.0, True), (30.0, False)):
        load = LoadReport(
            outstanding_s=seconds,
            by_priority={0: seconds},
            models={"a": ModelLoad(ModelState.ACTIVE, request_s=0.1), "b": cold["b"]},
        )
        control.fleet.loaded(here, load, [], [], 1.0)
        node = control.place(Ask(f"late-{seconds}", SessionKey("t", f"late-{seconds}"), "a"), 1.0).node
        assert (node == here) is same
