"""`make dashboards`: every query of every dashboard has data, as asked of a real Prometheus that has scraped a loaded
stack; so have the queries of vLLM's dashboards, and every alert rule can be evaluated.

    .venv/bin/python -m deploy.monitoring.check             also draws docs/dashboards/*.png
    .venv/bin/python -m deploy.monitoring.check --no-draw
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.monitoring import dashboards, vllm_dashboards
from deploy.monitoring.load import Load
from deploy.monitoring.prometheus import Prometheus, QueryFailed, filled_in, installed
from deploy.monitoring.scrape import scrape_config
from loadtest.stack import Stack
from runtime.config_file import load_config

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "dashboards"
NEEDS = "Prometheus is not installed: apt-get install prometheus"
_NAMES = ("left", "middle", "right")
_MODEL = {"path": str(ROOT / "models" / "demo"), "ttft_s": 0.5, "tpot_s": 0.1, "nodes": [0, 1]}
#: vLLM's dashboards are of one model at a time, because its servers are.
_CHOSEN = {"model_name": _NAMES[0]}
#: Three models that share each device. The weights of two fit beside their KV.
_SETTINGS = {
    "models": dict.fromkeys(_NAMES, _MODEL),
    "sharing": "prism",
    "worker": {"remap": "auto"},
    "kv": {"load_plan": False},
}


@contextmanager
def loaded(directory: Path, seconds: float) -> Iterator[tuple[Prometheus, float, float]]:
    """A Prometheus that has scraped a loaded stack for so long, and from when to when (Unix time)."""
    with Stack(nodes=2, hbm_gib=0.038, dram_gib=0.03, directory=directory / "stack", settings=_SETTINGS) as stack:
        config = load_config(
            stack.config_file,
            {"data": str(stack.data), "nodes": {"count": 2}, "gateway": {"port": stack.port}},
        )
        scraped = scrape_config(config, stack.data / "tls", every="1s")
        with Prometheus(scraped, directory / "prometheus") as prometheus:
            began = time.time()
            load = Load(stack.url, _NAMES)
            time.sleep(seconds)
            load.close()
            time.sleep(2.0)  # the last scrape
            if len(load.failures) > load.turns / 10:
                raise RuntimeError(f"{len(load.failures)} failures, {load.turns} turns: {load.failures[:3]}")
            print(f"{load.turns} turns in {time.time() - began:.0f} s, {len(load.failures)} failed")
            yield prometheus, began, time.time()


def complaints(prometheus: Prometheus, from_s: float, to_s: float) -> list[str]:
    """What has no data, or cannot be asked, or was not scraped; empty: all is well."""
    found = [f"not scraped: {target}" for target in prometheus.down()]
    found += [f"rule: {rule}" for rule in prometheus.broken_rules()]
    asked = [
        (f"{board.title}, {panel.title}", query.expr)
        for board in dashboards.BOARDS
        for panel in board.panels
        for query in panel.queries
    ]
    asked += [(f"vLLM: {name}", expr) for name, exprs in vllm_dashboards.QUERIES.items() for expr in exprs]
    for where, expr in asked:
        try:
            if not prometheus.lines(filled_in(expr, _CHOSEN), from_s, to_s):
                found.append(f"no data: {where}: {expr}")
        except QueryFailed as e:
            found.append(f"refused: {where}: {e}")
    print(f"{len(asked)} queries, {len(found)} complaints")
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-draw", action="store_true")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the load lasts")
    asked = parser.parse_args()
    if not installed():
        print(NEEDS)
        return 1
    with (
        tempfile.TemporaryDirectory(prefix="upbeat-dashboards-") as scratch,
        loaded(Path(scratch), asked.seconds) as (prometheus, from_s, to_s),
    ):
        found = complaints(prometheus, from_s, to_s)
        if not asked.no_draw:
            from deploy.monitoring.pictures import draw

            for board in dashboards.BOARDS:
                draw(board, prometheus, from_s, to_s, PICTURES / f"{board.name}.png")
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
