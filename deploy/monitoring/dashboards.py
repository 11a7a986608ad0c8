"""Writes the Grafana dashboards, deploy/grafana/*.json, from the modules beside this one.

.venv/bin/python -m deploy.monitoring.dashboards
"""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.monitoring.fleet import FLEET
from deploy.monitoring.models import MODELS
from deploy.monitoring.panels import text_of
from deploy.monitoring.slo import SLO
from deploy.monitoring.tiers import TIERS

DIRECTORY = Path(__file__).resolve().parents[1] / "grafana"
BOARDS = (FLEET, TIERS, MODELS, SLO)


def main() -> int:
    """Entry point."""
    DIRECTORY.mkdir(exist_ok=True)
    for board in BOARDS:
        (DIRECTORY / f"{board.name}.json").write_text(text_of(board))
    return 0


if __name__ == "__main__":
    sys.exit(main())
