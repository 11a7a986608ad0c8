"""`upbeat explain`: in words, and never wider than 80 columns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli import settings as cli_settings
from cli import waterfall
from cli.explain import WIDTH, lines
from cli.explain_model import _NEVER, _OF_LAYERS, _WHY
from cli.explain_model import lines as lines_of_model
from contracts.residency import OF_LAYERS, Never, Why
from contracts.turn_times import Phase, checked
from scheduler.core.policies import POLICIES


def score(node: str, **terms: float) -> dict[str, Any]:
    return {"node": node, "sum": sum(terms.values()), "terms": terms}


def decision(**more: Any) -> dict[str, Any]:
    base = {
        "what": "turn",
        "ago_s": 3.0,
        "node": "node-1",
        "request_id": "chatcmpl-1-0",
        "hinted": False,
        "prefetched_node": None,
    }
    base |= {"prefetched_s": None, "moves": 0, "pin_node": None, "avoided_nodes": 0, "source_nodes": [], "worth": None}
    return base | {"scores": [score("node-1", work_s=0.1, load_s=0.02), score("node-0", work_s=0.9, load_s=0.0)]} | more


def said(*decisions: dict[str, Any]) -> str:
    return " ".join("\n".join(lines({"id": "chat-1", "decisions": list(decisions)})).split())


def test_a_turn_without_a_hint_says_which_term_decided() -> None:
    text = said(decision())
    assert "turn chatcmpl-1-0, 3.0 s ago: node-1" in text and "No hint had announced it." in text
    assert "It costs 0.12 s there and 0.9 s on node-0, mostly for work_s, the work that waits there." in text
    assert "node load_s work_s sum" not in text and "node-0 0.9 0 0.9" in text, "terms in the order in which they came"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            {"hinted": True, "prefetched_node": "node-1", "prefetched_s": 4.25, "moves": 1},
            "there 4.2 s before, having moved once.",
        ),
        (
            {"hinted": True, "prefetched_node": "node-0", "prefetched_s": 4.0},
            "to node-0 4.0 s before, but here it is done sooner.",
        ),
        ({"hinted": True}, "A hint had announced it, but nothing was brought for that."),
        ({"what": "move", "moves": 2}, "The hint had gone elsewhere before, twice."),
        ({"what": "hint", "worth": "behind"}, "brought behind that of others."),
        ({"what": "hint", "worth": "noted"}, "nothing is brought for it."),
        (
            {"taken": True},
            "The gateway sent it to node-1 at once, as its hint had chosen it already, so nothing else was weighed.",
        ),
        ({"pin_node": "node-1"}, "node-1 was asked for by name, so nothing else was weighed."),
        ({"avoided_nodes": 2}, "Nodes that were to be avoided: 2."),
        ({"source_nodes": ["node-0", "node-2"]}, "Others that had the session's cache: node-0, node-2."),
        ({"scores": [score("node-1", work_s=0.0)]}, "node-1 was the only node to choose from."),
        (
            {"scores": [score("node-1", work_s=1.0), score("node-0", work_s=1.0)]},
            "the session's name decides between equals.",
        ),
        (
            {"scores": [score("node-1", held_tokens=-640.0), score("node-0", held_tokens=0.0)]},
            "It costs -640 there and 0 on node-0",
        ),
        ({"ago_s": 600.0}, "10 min ago"),
    ],
)
def test_what_was_known_is_said_in_words(more: dict[str, Any], text: str) -> None:
    assert text in said(decision(**more))


names = st.text("abcdefgh-0123456789", min_size=1, max_size=70)
amounts = st.floats(-1e9, 1e9, allow_nan=False)


def test_where_a_turns_time_went_is_a_waterfall_until_its_first_token() -> None:
    until = {"admit": 0.0004, "queue": 0.04, "load-ssd": 0.08, "compute": 0.0396}
    shown = list(
        lines({"id": "chat-1", "decisions": [decision(until_first_s=until, after_s={"decode": 1.5, "memory": 0.25})]})
    )
    admit, queue, load, compute, last = shown[-5:]
    assert [row.split("  ")[1].strip() for row in (admit, queue, load, compute)] == [
        *("waited for the gateway", "waited in the queue", "loaded from SSD", "computed")
    ]
    assert [row.split()[-2] for row in (admit, queue, load, compute)] == ["0.4", "40.0", "80.0", "39.6"]
    assert [row.count("#") for row in (queue, load, compute)] == pytest.approx([10, 20, 10], abs=1) and admit.count(
        "#"
    ) == 1
    assert queue.rindex("#") + 1 == load.index("#") and load.rindex("#") + 1 == compute.index("#")
    assert last == "  First token after 160.0 ms, then decoded for 1500.0 ms, waited for 250.0 ms."
    assert max(map(len, shown)) <= WIDTH


def test_where_nobody_has_said_it_there_is_no_waterfall() -> None:
    assert (
        said(decision()) == said(decision(until_first_s=None, after_s=None)) == said(decision(until_first_s={"x": 1.0}))
    )
    assert "First token" not in said(decision())


seconds = st.dictionaries(
    st.sampled_from([*map(str, Phase)]), st.floats(0, 1e7) | st.floats() | st.integers() | st.text(max_size=2)
)


@given(seconds, seconds)
@settings(max_examples=100, deadline=None)
def test_a_waterfall_fits_80_columns_whatever_took_how_long(until: dict[str, Any], after: dict[str, Any]) -> None:
    shown = list(waterfall.lines(until, after))
    assert all(len(row) <= WIDTH and row.isascii() for row in shown)
    assert sum("#" in row for row in shown) == len(checked(until))


@given(
    st.lists(names, min_size=1, max_size=5),
    st.lists(st.text("abcdefgh_", min_size=1, max_size=14), min_size=1, max_size=9, unique=True),
    st.data(),
)
@settings(max_examples=100, deadline=None)
def test_tables_fit_80_columns_whatever_nodes_and_terms_are_called(
    nodes: list[str], terms: list[str], data: st.DataObject
) -> None:
    scores = [score(node, **{term: data.draw(amounts) for term in terms}) for node in nodes]
    shown = list(lines({"id": "chat-1", "decisions": [decision(scores=scores, node=nodes[0])]}))
    assert max(map(len, shown)) <= WIDTH, shown


def test_the_command_line_knows_the_schedulers_policies() -> None:
    assert set(POLICIES) == set(cli_settings.POLICIES) and set(POLICIES) <= set(cli_settings.policies())


def moved(**more: Any) -> dict[str, Any]:
    return {"ago_s": 3.0, "state": "cold", "why": "for_kv", "other": "big", "seconds": 0.0} | more


def said_of_model(*moves: dict[str, Any], **more: Any) -> str:
    nodes = [{"node": "node-0", "state": "cold", "moves": list(moves)} | more]
    return " ".join("\n".join(lines_of_model({"id": "small", "nodes": nodes})).split())


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (moved(), "cold 3.0 s ago: no request had used it, and big needed memory for KV"),
        (
            moved(why="for_weights", seconds=50),
            "no request had used it for 50.0 s, and big needed memory for its weights",
        ),
        (moved(state="loading", why="hint", other=None), "loading 3.0 s ago: a hint said that a request comes"),
        (moved(state="active", why="loaded", seconds=0.25), "its weights were there after 250 ms"),
        (moved(why="of a later version", other=None), "cold 3.0 s ago: of a later version"),
    ],
)
def test_why_a_models_weights_moved_is_said_in_words(move: dict[str, Any], text: str) -> None:
    assert said_of_model(move).endswith(text)


def may_lend(**more: Any) -> dict[str, Any]:
    return {"idle": 0, "computing": 0, "transfer_s": 0.0051, "layer_s": 0.00032, "never": None} | more


@pytest.mark.parametrize(
    ("move", "text"),
    [
        (
            moved(why="lent", layers_lent=5, seconds=0.8),
            "lends 5 of 24 layers 3.0 s ago: big needed memory for KV; one after another in 800 ms",
        ),
        (
            moved(why="lent", layers_lent=1, other="small"),
            "lends 1 of 24 layers 3.0 s ago: it needed memory for KV itself",
        ),
        (
            moved(why="calm", layers_lent=0, other=None),
            "lends none of 24 layers 3.0 s ago: nobody had lacked memory for a while",
        ),
        (moved(why="slow", layers_lent=2, other=None), "lends 2 of 24 layers 3.0 s ago: its steps were too slow"),
    ],
)
def test_why_layers_were_lent_and_taken_back_is_said_in_words(move: dict[str, Any], text: str) -> None:
    assert said_of_model(move, layers=24).endswith(text)


@pytest.mark.parametrize(
    ("may", "text"),
    [
        (
            may_lend(idle=12, computing=3),
            "may lend 12 of its 24 layers to KV while idle, 3 while it computes: copying a layer takes 5.1 ms, "
            "computing one 0.32 ms",
        ),
        (
            may_lend(),
            "lends no layers to KV: copying a layer takes 5.1 ms, computing one 0.32 ms, so steps would wait for "
            "copies",
        ),
        (
            may_lend(never="no_image"),
            "lends no layers to KV: there is no image of its weights in host memory (worker.images_gib)",
        ),
        (may_lend(never="of a later version"), "lends no layers to KV: of a later version"),
    ],
)
def test_what_a_model_may_lend_and_why_no_more_is_said_in_words(may: dict[str, Any], text: str) -> None:
    assert f" {text} cold 3.0 s ago" in said_of_model(moved(), layers=24, may_lend=may)
    assert "lend" not in said_of_model(moved(), layers=24, may_lend=None)


def test_every_reason_has_words_and_fits_80_columns() -> None:
    assert set(_WHY) == set(Why) and set(_OF_LAYERS) == OF_LAYERS and set(_NEVER) == set(Never)
    name = "a-model-whose-name-is-long-" * 3
    moves = [moved(why=why, other=name, seconds=99.0, layers_lent=99) for why in Why]
    mays = [may_lend(idle=99, computing=99), *(may_lend(never=never.value) for never in Never)]
    nodes = [{"node": "n", "state": "cold", "moves": moves, "layers": 99, "may_lend": may} for may in mays]
    assert all(len(line) <= WIDTH for line in lines_of_model({"id": name, "nodes": nodes}))


def test_weights_that_never_moved_and_models_that_no_worker_has() -> None:
    assert "its weights stay there" in said_of_model()
    assert list(lines_of_model({"id": "small", "nodes": []})) == ["small: no worker that is here has it"]
