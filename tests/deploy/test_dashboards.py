"""Dashboards and alerts ask for what services show; a real Prometheus has data for every query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.monitoring import vllm_dashboards
from deploy.monitoring.check import NEEDS
from deploy.monitoring.dashboards import BOARDS, DIRECTORY
from deploy.monitoring.metrics_table import PAGE
from deploy.monitoring.panels import text_of
from deploy.monitoring.prometheus import filled_in, installed
from deploy.monitoring.scrape import ALERTS, scrape_config
from runtime.config_file import load_config

ROOT = Path(__file__).parents[2]
RULES = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
#: Labels that the scrape configuration and Prometheus give.
GIVEN = {"job", "instance", "service", "node", "le"}
_NAME = re.compile(r"(?<![\w:])((?:upbeat|vllm|process)[_:]\w+)")
QUERIES = {
    **{f"{b.name}: {p.title}: {q.expr}": q.expr for b in BOARDS for p in b.panels for q in p.queries},
    **{f"alert {rule['alert']}": rule["expr"] for rule in RULES},
    **{f"{name}: {expr}": expr for name, exprs in vllm_dashboards.QUERIES.items() for expr in exprs},
}


def table() -> dict[str, set[str]]:
    """Labels by the names of series."""
    found = {}
    for name, kind, labels in re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*) \|", PAGE.read_text(), re.MULTILINE):
        for ending in ("_bucket", "_sum", "_count") if kind == "histogram" else ("",):
            found[name + ending] = set(labels.replace(",", " ").split())
    return found


@pytest.mark.parametrize("query", QUERIES.values(), ids=list(QUERIES))
def test_a_query_asks_for_what_a_service_shows(query: str) -> None:
    shown, asked = table(), set(_NAME.findall(query))
    assert asked <= shown.keys()
    known = GIVEN.union(*(shown[name] for name in asked))
    groups = re.findall(r"\b(?:by|on|group_left) ?\(([^)]*)\)", query)
    grouped = {label for labels in groups for label in labels.split(",")}
    selected = set(re.findall(r'(\w+)[=!]~?"', query))
    assert {label.strip() for label in grouped | selected} - {""} <= known


def test_a_test_of_names_notices_an_unknown_one() -> None:
    with pytest.raises(AssertionError):
        test_a_query_asks_for_what_a_service_shows("rate(upbeat_gateway_nothing_total[5m])")
    with pytest.raises(AssertionError):
        test_a_query_asks_for_what_a_service_shows('upbeat_kvstore_tier_up{colour="red"}')


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_is_what_its_module_says(board) -> None:  # type: ignore[no-untyped-def]
    text = (DIRECTORY / f"{board.name}.json").read_text()
    assert text == text_of(board), "run `make dashboards`"
    told = json.loads(text)
    assert len({panel["title"] for panel in told["panels"]}) == len(board.panels)
    legends = {label for p in board.panels for q in p.queries for label in re.findall(r"\{\{(\w+)\}\}", q.legend)}
    assert legends <= GIVEN.union(*table().values())


def test_every_dashboard_has_its_picture_and_every_alert_its_remedy() -> None:
    text = (ROOT / "docs" / "monitoring.md").read_text()
    assert {path.stem for path in DIRECTORY.glob("*.json")} == {board.name for board in BOARDS}
    for board in BOARDS:
        assert (ROOT / "docs" / "dashboards" / f"{board.name}.png").exists()
        assert f"dashboards/{board.name}.png" in text and f"grafana/{board.name}.json" in text
    named = {alert for row in re.findall(r"^\| (Upbeat[^|]*) \|", text, re.MULTILINE) for alert in row.split(", ")}
    assert named == {rule["alert"] for rule in RULES}


def test_every_alert_has_a_test_in_which_it_fires() -> None:
    tests = yaml.safe_load((ALERTS.parent / "alerts_test.yml").read_text())["tests"]
    fired = {each["alertname"] for test in tests for each in test.get("alert_rule_test", ()) if each["exp_alerts"]}
    assert fired == {rule["alert"] for rule in RULES}


def test_promtool_agrees_with_rules_and_configurations(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip(NEEDS)
    config = load_config(None, {"nodes": {"count": 2, "devices": 2}, "scheduler": {"count": 2}, "data": str(tmp_path)})
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(scrape_config(config, None)))
    commands = (
        ["check", "rules", str(ALERTS)],
        ["test", "rules", str(ALERTS.parent / "alerts_test.yml")],
        ["check", "config", str(tmp_path / "prometheus.yml")],
        ["check", "config", "--syntax-only", str(ROOT / "deploy" / "prometheus.yml")],
    )
    for command in commands:
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_process_of_a_deployment_is_scraped_by_its_name_and_port(tmp_path: Path) -> None:
    config = load_config(None, {"nodes": {"count": 2, "devices": 2}, "scheduler": {"count": 2}, "data": str(tmp_path)})
    jobs = {job["job_name"]: job for job in scrape_config(config, tmp_path / "tls")["scrape_configs"]}
    found = {
        (name, target["labels"].get("node", ""), target["targets"][0])
        for name, job in jobs.items()
        for target in job["static_configs"]
    }
    places = [config.node(n) for n in range(2)]
    expected = {("upbeat-gateway", "", f"127.0.0.1:{config.gateway.port}")}
    expected |= {("upbeat-scheduler", "", f"127.0.0.1:{config.scheduler.port + n + 10}") for n in range(2)}
    expected |= {(f"upbeat-{p.name}", p.name, f"127.0.0.1:{p.store_metrics_port}") for p in places}
    expected |= {(f"upbeat-{p.name}", d.name, f"127.0.0.1:{d.metrics_port}") for p in places for d in p.devices}
    assert found == expected
    assert "tls_config" not in jobs["upbeat-gateway"]
    assert jobs["upbeat-node-1"]["tls_config"]["server_name"] == "node-1.node.upbeat.internal"


def test_variables_of_a_dashboard_stand_for_everything() -> None:
    assert filled_in('a{m=~"$model", n=~"$node", s="x"}[$__rate_interval]') == 'a{m=~".*", n=~".*", s="x"}[15s]'
    assert filled_in('a{m="$model_name", n=~"$node"}', {"model_name": "x"}) == 'a{m="x", n=~".*"}'


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.stack
@pytest.mark.timeout(600)
def test_every_panel_has_data() -> None:
    if not installed():
        pytest.skip(NEEDS)
    command = [sys.executable, "-m", "deploy.monitoring.check", "--no-draw", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=570, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
