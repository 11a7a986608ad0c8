"""Simulated runs, kept on disk: a run that several results share is simulated once, and a stopped bench goes on where
it was. A file is named by a digest of the run's settings and of what its users say, its folder by one of the simulated
sources, so it never is a run of other code."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.report import write_json
from loadtest.simulate.scenario import Run, simulate
from loadtest.simulate.users import Script
from loadtest.sources import ROOT, digests, in_work_tree


@dataclass(frozen=True, slots=True)
class Cell:
    """What benches use of a run. loads: requests on each GPU, every `scenario.SAMPLE_EVERY_S`. cpu_s: processor time
    that simulating it took, once."""

    figures: dict[str, Any]
    loads: list[list[float]]
    cpu_s: float


class Cells:
    """Runs of one state of the sources. found_cpu_s: processor time of those that were on disk."""

    def __init__(self, folder: Path | None, parts: Sequence[str] = ()) -> None:
        """folder: of the cells; None: nothing is kept. parts: of `loadtest.sources`, which runs depend on."""
        self.found_cpu_s = 0.0
        self._folder = None
        if folder is not None:
            state = hashlib.sha256(canonical(digests(in_work_tree(ROOT, parts), parts)).encode()).hexdigest()[:16]
            self._folder = folder / state

    def forget_others(self) -> None:
        """Delete the cells of other states of the sources."""
        if self._folder is not None and self._folder.parent.exists():
            for other in self._folder.parent.iterdir():
                if other != self._folder:
                    shutil.rmtree(other)

    def run(self, run: Run, said: Sequence[Script]) -> Cell:
        """The run's cell, simulated if it is not on disk."""
        if self._folder is None:
            return _simulated(run, said)
        name = hashlib.sha256(f"{canonical(run)} {said!r}".encode()).hexdigest()
        path = self._folder / f"{name}.json"
        if path.exists():
            cell = Cell(**json.loads(path.read_text(encoding="utf-8")))
            self.found_cpu_s += cell.cpu_s
            return cell
        cell = _simulated(run, said)
        own = path.with_suffix(f".{os.getpid()}")  # another process may simulate the same run
        write_json(own, dataclasses.asdict(cell))
        own.replace(path)
        return cell


def canonical(value: Any) -> str:
    """A text that is equal, in every process, for equal settings only. Raises TypeError for what has none."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if dataclasses.is_dataclass(value):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return f"{canonical(type(value))}{canonical(fields)}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{canonical(k)}: {canonical(v)}' for k, v in value.items()))}}}"
    if isinstance(value, frozenset | set):
        return f"{{{', '.join(sorted(map(canonical, value)))}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(canonical, value))}]"
    if value is None or isinstance(value, str | bytes | int | float):
        return repr(value)
    if hasattr(value, "__dict__") and not callable(value):
        return f"{canonical(type(value))}{canonical(vars(value))}"
    raise TypeError(f"a run's settings hold {value!r}, of which no cell can be named")


def _simulated(run: Run, said: Sequence[Script]) -> Cell:
    began = time.process_time()
    found = simulate(run, said)
    figures = json.loads(json.dumps(found.figures))  # as from the disk
    return Cell(figures, [list(map(float, each)) for each in found.fleet.loads], time.process_time() - began)
