"""docs/metrics.md has every metric that a service shows, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.monitoring.metrics_table import PAGE, SERVICES, of, page
from loadtest.stack import Stack
from runtime.config_file import load_config
from scheduler.metrics import METRICS_PORT

ROOT = Path(__file__).parents[2]
#: By service: metric to its type and labels.
Table = dict[str, dict[str, tuple[str, frozenset[str]]]]


def documented() -> Table:
    """The page, read back."""
    every: dict[str, tuple[str, frozenset[str]]] = {}
    found: Table = {service: {} for service in SERVICES}
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = re.split(r"[:\n]", section)[0]
        rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \|", section, re.MULTILINE)
        into = every if title == "Every service" else found[title.lower()]
        into |= {name: (kind, frozenset(labels.replace(",", " ").split())) for name, kind, labels in rows}
    return {service: own | every for service, own in found.items()}


def test_the_page_is_what_the_code_says() -> None:
    told = {service: of(service) for service in SERVICES}
    assert page(told) == PAGE.read_text(), "run `make metrics-table`"
    table = documented()
    for service, found in told.items():
        shared = {each.name for each in found} & {name for other in table.values() for name in other}
        assert {each.name for each in found} == shared, service


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.stack
def test_running_services_show_what_the_page_says(tmp_path: Path) -> None:
    demo = ROOT / "models" / "demo"
    settings = {"gateway": {"processes": 1}, "worker": {"remap": "auto"}, "scheduler": {"count": 1}}
    with Stack(models={"a": demo, "b": demo}, nodes=1, directory=tmp_path, settings=settings) as stack:
        asked = {"model": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        httpx.post(f"{stack.url}/v1/chat/completions", json=asked, timeout=60).raise_for_status()
        config = load_config(stack.config_file, {"data": str(stack.data), "nodes": {"count": 1}})
        base = config.nodes.base_port
        pages = {
            "gateway": stack.gateway_metrics(),
            "scheduler": stack.metrics(config.scheduler.port + METRICS_PORT),
            "worker": stack.metrics(base + 3),
            "kvstore": stack.metrics(base + 4),
        }
    table = documented()
    for service, text in pages.items():
        shown = {}
        for family in text_string_to_metric_families(text):
            name = family.name + ("_total" if family.type == "counter" else "")
            shown[name] = family.type
            labels = frozenset(label for s in family.samples for label in s.labels) - {"le"}
            assert not family.samples or labels == table[service][name][1], f"{service}: {name}"
        assert shown == {name: kind for name, (kind, _) in table[service].items()}, service
        assert any(family.samples for family in text_string_to_metric_families(text))
