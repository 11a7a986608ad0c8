"""No decision of ours is written again in `loadtest/`: our nodes are production's cores and ways for bytes. Other
systems, which decide otherwise, have a room of their own (`loadtest/simulate/systems/`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.core.store import Store
from loadtest.simulate.events import Events
from loadtest.simulate.fleet import VARIANTS, Fleet
from loadtest.simulate.node import SimulatedNode
from loadtest.simulate.presets import PRESETS
from scheduler.core.control import Control
from worker.core.engine_core import EngineCore
from worker.core.hbm import HbmCache

ROOT = Path(__file__).parents[3]
SYSTEMS = ROOT / "loadtest" / "simulate" / "systems"
OURS = sorted(path for path in ROOT.glob("loadtest/**/*.py") if not path.is_relative_to(SYSTEMS))
SIMULATOR = [path for path in OURS if path.is_relative_to(ROOT / "loadtest" / "simulate")]
CORES = sorted(
    path for service in ("worker", "kvstore", "scheduler", "storelink") for path in ROOT.glob(f"{service}/core/**/*.py")
)

#: What `loadtest/` has of the cores: the objects that decide, what they are told and ask for, and plain values. No
#: function that decides.
TAKEN = {
    "worker.core": {"events", "instructions"},
    "worker.core.balloon": {"Balloon", "Share"},
    "worker.core.engine_core": {"EngineCore"},
    "worker.core.harvest": {"Split"},
    "worker.core.hbm": {"HbmCache"},
    "worker.core.lending": {"Lending"},
    "worker.core.remap": {"Circulate"},
    "storelink.core.load_plan": {"LoadRate", "Source"},
    "worker.core.pace": {"Pace"},
    "worker.core.pages": {"PagePool"},
    "worker.core.policy": {"Policy"},
    "worker.core.residency": {"Load", "Residency"},
    "worker.core.resident": {"Expected", "Resident"},
    "worker.core.sequence": {"Sequence"},
    "worker.core.state": {"CoreState"},
    "worker.core.turns": {"turns_of"},
    "worker.core.window": {"Window"},
    "worker.core.yielding": {"Yielding"},
    "kvstore.core": {"events", "instructions"},
    "kvstore.core.store": {"Store"},
    "scheduler.core.advisories": {"Hint"},
    "scheduler.core.callgraph": {"CallGraph"},
    "scheduler.core.callgraph_runs": {"Run"},
    "scheduler.core.commands": {"Spare", "Wake", "Withdraw"},
    "scheduler.core.control": {"Ask", "Command", "Control", "Prefetch", "Settings"},
    "scheduler.core.directory": {"Held"},
    "scheduler.core.fleet": {"LoadReport", "Model", "Rates"},
    "scheduler.core.models": {"ModelLoad"},
    "scheduler.core.policies": {"POLICIES"},
    "scheduler.core.scale_policy": {"Policy", "Recommender", "policy_of"},
    "scheduler.core.scale_signals": {"TPOT", "TTFT", "Attained", "signals"},
}
#: What is asked of a core object beside notice it and doing what it says.
ASKED = {
    # of an engine's: its step, when it decides next, how far it is; what it is built with, and what it counts
    *(
        "handle",
        "take",
        "turn",
        "going_on",
        "due_in_s",
        "quiet_steps",
        "quiet_s",
        "interrupted",
        "may_fit",
        "counts",
        "validate",
        "live",
    ),
    *("pace", "state", "admission", "scheduling"),
    # of a store's: whether it wants to be told of the time or to go on planning, and what it holds
    *("busy", "unplanned", "index", "saves"),
}
#: Parts of an engine's core that are read, and what of them.
READ = {
    "state": {"rates", "cache", "unmap"},
    "admission": {"recomputed_tokens"},
    "scheduling": {"recomputed_tokens", "preemptions"},
    "saves": {"waiting_bytes"},
}
#: Names of what decides.
DECIDES = re.compile(
    "evict|victim|admi(t|ssion)|preempt|room|reserve|choose|batch|worth|rank|max_prefill|budget|band", re.IGNORECASE
)
#: Where things are put in order of time, or so that equal seeds give equal runs.
IN_ORDER = {
    "events.py": {"heapq"},
    "channels.py": {"heapq"},
    "crowd.py": {"heapq"},
    "node.py": {"sorted"},
    "many.py": {"sorted"},
}


def core_names(path: Path) -> Iterator[tuple[str, str]]:
    """(module of a core, name) that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and re.match(
            r"(worker|kvstore|scheduler|gateway|storelink)\.core", node.module or ""
        ):
            yield from ((node.module or "", alias.name) for alias in node.names)


def decisions(path: Path) -> list[str]:
    """What in a file of the simulator looks like a decision, in words."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if DECIDES.search(name):
                found.append(f"{name} is named for a decision")
            case ast.Attribute(attr=name, value=ast.Attribute(attr="core")) if name not in ASKED:
                found.append(f"reads .core.{name}")
            case ast.Attribute(attr=name, value=ast.Attribute(attr=part, value=ast.Attribute(attr="core"))) if (
                name not in READ.get(part, {name})
            ):
                found.append(f"reads .core.{part}.{name}")
            case ast.Call(func=ast.Name(id="min" | "max" | "sorted" as ranks), keywords=keys) if any(
                k.arg == "key" for k in keys
            ):
                found.append(f"{ranks} by a key")
            case ast.Call(func=ast.Attribute(attr="sort", value=_), keywords=keys) if keys:
                found.append("sort by a key")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="heapq"), attr=_)):
                found.append("heapq keeps an order")
    allowed = IN_ORDER.get(path.name, set()) if path in SIMULATOR else set()
    return [what for what in found if what.split()[0] not in allowed]


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if variant.ours])
def test_a_fleet_of_ours_is_made_of_productions_cores(name: str) -> None:
    fleet = Fleet(Events(), PRESETS["a100-llama-3.1-8b"], 2, VARIANTS[name])
    assert type(fleet.control) is Control
    for node in fleet.nodes.values():
        assert type(node) is SimulatedNode and type(node.core) is EngineCore and type(node.store.core) is Store
        assert type(node.core.state.cache) is HbmCache and node.engine.core is node.core


def test_only_other_peoples_systems_have_nodes_of_their_own() -> None:
    others = {name for name, variant in VARIANTS.items() if not variant.ours}
    assert others == {
        "llumnix", "infercept", "infercept-ssd", "llumnix-infercept", "infercept-migration", "parrot", "lmcache",
        "lmcache-ssd", "prefix-caching",
    }  # fmt: skip
    assert all(not VARIANTS[name].hints for name in others), "none of them has hints"


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT)))
def test_of_the_cores_only_objects_and_words_are_taken(path: Path) -> None:
    for module, name in core_names(path):
        if not module.startswith("gateway"):
            assert name in TAKEN.get(module, set()), f"{path} takes {name} from {module}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            taken = {name for names in TAKEN.values() for name in names}
            assert not {ast.unparse(base).split(".")[-1] for base in node.bases} & taken, (
                f"{path}: {node.name} changes what a core does"
            )


@pytest.mark.parametrize("path", SIMULATOR, ids=lambda path: path.stem)
def test_nothing_in_the_simulator_looks_like_a_decision(path: Path) -> None:
    assert decisions(path) == []


def test_no_function_of_a_core_is_defined_again() -> None:
    def functions(path: Path) -> set[str]:
        return {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        }

    theirs = {name for path in CORES for name in functions(path)}
    again = {(path.name, name) for path in ROOT.glob("loadtest/simulate/**/*.py") for name in functions(path) & theirs}
    assert again == set()


def test_what_does_decide_is_found() -> None:
    """Other systems' files decide, and so does each core: were one of them copied here, it would be seen."""
    for name in ("node.py", "engine.py", "llumnix.py", "infercept.py", "parrot.py"):
        assert decisions(SYSTEMS / name), name
    for name in ("admission", "batching", "fairness", "hbm", "prefetch", "preemption", "scheduling", "victims"):
        assert decisions(ROOT / "worker" / "core" / f"{name}.py"), name
    for name in ("defragmentation", "eviction", "room"):
        assert decisions(ROOT / "kvstore" / "core" / f"{name}.py"), name
