"""Writes docs/metrics.md: every metric of every service, read from the services' own registries.

    .venv/bin/python -m deploy.monitoring.metrics_table             writes the page
    .venv/bin/python -m deploy.monitoring.metrics_table --check     says whether it is up to date

Each service is asked in a process of its own, because a process has one registry. Collectors that show a running
service are given one with nothing in it: names, types and labels do not depend on what runs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "metrics.md"
HEAD = """\
# Metrics

Every metric of every service. `make metrics-table` writes this page from the code; a test compares it with what
running services show. Where to scrape, alerts and dashboards: [monitoring.md](monitoring.md).

Counters end in `_total`. A histogram has `_bucket` (with the label `le`), `_sum` and `_count`. Times are in seconds,
sizes in bytes. With several gateway processes each of theirs has the label `process` too. Where a text has a label's
name and a colon, its values follow.
"""


@dataclass(frozen=True, slots=True, order=True)
class Shown:
    """A metric as a service shows it. name: with `_total`, for a counter."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _scheduler(register: Callable[[Any], None]) -> None:
    from scheduler.core.control import Control
    from scheduler.metrics import SchedulerMetrics
    from scheduler.scale_metrics import ScaleMetrics

    register(SchedulerMetrics(Control()))
    register(ScaleMetrics(lambda: None))


def _worker(register: Callable[[Any], None]) -> None:
    from contracts.models import ModelState
    from worker.core.balloon import Balloon
    from worker.core.request_figures import RequestFigures
    from worker.core.residency import Residency
    from worker.engine.contract import Tallies
    from worker.service.metrics import WorkerMetrics
    from worker.service.vllm_names import VllmNames

    register(WorkerMetrics([], dict, Residency(Balloon(0))))
    counts = SimpleNamespace(running=0, waiting=0, loading=0, pages_total=0, pages_free=0)
    engine: Any = SimpleNamespace(model_name="m", tallies=Tallies, figures=RequestFigures(), counts=counts)
    register(VllmNames([engine], lambda name: ModelState.ACTIVE))


def _sidecar(register: Callable[[Any], None]) -> None:
    from sidecar.core.samples import Sample
    from sidecar.metrics import SidecarMetrics

    blank: Any = SimpleNamespace
    sample = Sample(blocks=1, block_tokens=1)
    shape = blank(piece_bytes=1, token_bytes=1, chunk_tokens=1, layers=1, pages=1)
    watching = blank(up=True, transfers=False, wakes=0, sample=sample)
    tally = blank(outcomes={}, up_bytes=0, down_bytes=0, held_bytes=0)
    register(SidecarMetrics(blank(model_name="m", shape=shape), watching, [], tally, blank(warmed=0)))


#: What each service's process imports, and what it registers beyond that.
SERVICES: dict[str, Callable[[Callable[[Any], None]], None]] = {
    "gateway": lambda register: None,
    "scheduler": _scheduler,
    "kvstore": lambda register: None,
    "worker": _worker,
    "sidecar": _sidecar,
}


def of_this_process(service: str) -> list[Shown]:
    """What `service` shows, which this process then is."""
    importlib.import_module(f"{service}.__main__")
    from runtime.telemetry import REGISTRY

    SERVICES[service](REGISTRY.register)
    return shown(REGISTRY)


def shown(registry: Any) -> list[Shown]:
    """The metrics of a prometheus_client registry. The libraries' families know their labels, and say so only here."""
    labels = {
        metric._name: tuple(metric._labelnames) for metric in registry._collector_to_names if hasattr(metric, "_name")
    }
    found = []
    for family in registry.collect():
        names = labels.get(family.name) or tuple(getattr(family, "_labelnames", ()))
        ending = "_total" if family.type == "counter" else ""
        found.append(Shown(family.name + ending, family.type, names, family.documentation))
    return sorted(found)


def of(service: str) -> list[Shown]:
    """What `service` shows."""
    asked = subprocess.run(
        [sys.executable, "-m", "deploy.monitoring.metrics_table", "--service", service],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    return [Shown(**{**each, "labels": tuple(each["labels"])}) for each in json.loads(asked.stdout)]


def page(services: dict[str, list[Shown]]) -> str:
    """docs/metrics.md. Raises ValueError when two services show one name differently."""
    everywhere = {each.name for each in services["gateway"]}.intersection(
        *({each.name for each in found} for found in services.values())
    )
    parts = [HEAD]
    own = [each for each in services["gateway"] if each.name in everywhere]
    parts.append(_section("Every service", [each for each in own if not each.name.startswith("process_")]))
    parts.append(_section("Every service: the process", [each for each in own if each.name.startswith("process_")]))
    told: dict[str, tuple[str, Shown]] = {}
    for service, found in services.items():
        mine = []
        for each in found:
            if each.name in everywhere:
                continue
            first, before = told.setdefault(each.name, (service, each))
            if (before.kind, before.labels) != (each.kind, each.labels):
                raise ValueError(f"{each.name}: {first} shows {before}, and {service} {each}")
            mine.append(each)
        ours = [each for each in mine if not each.name.startswith("vllm:")]
        parts.append(_section(service.capitalize(), ours))
        if theirs := [each for each in mine if each.name.startswith("vllm:")]:
            title = f"{service.capitalize()}: vLLM's names"
            parts.append(_section(title, theirs, "With `worker.vllm_names`, which is on by default."))
    return "\n".join(parts)


def _section(title: str, found: Iterable[Shown], text: str = "") -> str:
    rows = [f"| `{e.name}` | {e.kind} | {', '.join(e.labels)} | {_escaped(e.text)} |" for e in sorted(found)]
    lead = [f"## {title}", "", *([text, ""] if text else [])]
    return "\n".join([*lead, "| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--service", choices=SERVICES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.service:
        print(json.dumps([asdict(each) for each in of_this_process(asked.service)]))
        return 0
    text = page({service: of(service) for service in SERVICES})
    if asked.check:
        same = PAGE.exists() and PAGE.read_text() == text
        print("docs/metrics.md is up to date" if same else "docs/metrics.md is old: run `make metrics-table`")
        return 0 if same else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
