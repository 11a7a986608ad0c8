"""A run is simulated once for one state of the code and one setting, and is the same from the disk."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from bench.symphony import loads
from bench.symphony.figures import KIND_8B
from loadtest.habits import Habits
from loadtest.simulate import cells
from loadtest.simulate.cells import Cell, Cells, canonical
from loadtest.simulate.fleet import VARIANTS
from loadtest.simulate.mechanisms import Mechanisms
from loadtest.simulate.scenario import Run
from loadtest.simulate.users import Script

SAID = loads.sharegpt_like(4, 20.0, 5_000, seed=1)
RUN = Run(KIND_8B, 2, VARIANTS["balanced"], 4, 20.0, 1, 5.0, habits={"default": Habits(missed=0.5)}, spread_s=3.0)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs that were simulated."""
    runs: list[Run] = []

    def counted(run: Run, said: list[Script], *, of: Any = cells._simulated) -> Cell:
        runs.append(run)
        return of(run, said)

    monkeypatch.setattr(cells, "_simulated", counted)
    return runs


def test_a_run_is_simulated_once_and_the_same_from_the_disk(tmp_path: Path, simulated: list[Run]) -> None:
    first = Cells(tmp_path, ["loadtest/simulate"]).run(RUN, SAID)
    again = Cells(tmp_path, ["loadtest/simulate"])
    assert again.run(RUN, SAID) == first and len(simulated) == 1
    assert first.figures["requests"] > 0 and first.loads and again.found_cpu_s == first.cpu_s > 0


@pytest.mark.parametrize("other", ["seed", "variant", "said", "sources", "nowhere"])
def test_another_run_is_simulated(
    tmp_path: Path, simulated: list[Run], monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    Cells(tmp_path, ["loadtest/simulate"]).run(RUN, SAID)
    run, said, folder = RUN, SAID, tmp_path
    if other == "seed":
        run = dataclasses.replace(RUN, seed=2)
    elif other == "variant":
        run = dataclasses.replace(RUN, variant=dataclasses.replace(RUN.variant, has=Mechanisms(cooperative=False)))
    elif other == "said":
        said = loads.sharegpt_like(4, 20.0, 5_000, seed=2)
    elif other == "sources":
        monkeypatch.setattr(cells, "digests", lambda blobs, parts: dict.fromkeys(parts, "changed"))
    found = Cells(None if other == "nowhere" else folder, ["loadtest/simulate"])
    found.run(run, said)
    assert len(simulated) == 2 and found.found_cpu_s == 0
    found.forget_others()
    assert len(list(tmp_path.iterdir())) == 1


def test_settings_have_one_name() -> None:
    assert canonical({"b": frozenset("xyz"), "a": 1.0}) == canonical({"a": 1.0, "b": frozenset("zyx")})
    assert canonical(RUN) == canonical(Run(**{f: getattr(RUN, f) for f in RUN.__slots__}))
    assert canonical(VARIANTS["llumnix"]) != canonical(VARIANTS["recompute"])
    with pytest.raises(TypeError, match="no cell can be named"):
        canonical(functools.partial(print))
