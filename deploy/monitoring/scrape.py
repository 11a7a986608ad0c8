"""The scrape configuration of a deployment, for Prometheus:

    .venv/bin/python -m deploy.monitoring.scrape --config upbeat.yaml > prometheus.yml

Jobs and labels are those of deploy/prometheus.yml, which is written for compose.yaml.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from contracts import identity
from contracts.identity import OPERATOR
from runtime.config import Config
from runtime.config_file import load_config
from scheduler.metrics import metrics_port

ALERTS = Path(__file__).resolve().parents[1] / "prometheus" / "alerts.yml"


def scrape_config(config: Config, certificates: Path | None, every: str = "5s") -> dict[str, Any]:
    """certificates: the directory with the operator's certificate, where internal services have one; None: they have
    none. A scheduler whose metrics have no port is left out."""
    jobs = [_job("upbeat-gateway", [(_at(config.gateway.host, config.gateway.port), {"service": "gateway"})])]
    schedulers = []
    for address in config.scheduler_addresses:
        host, _, port = address.rpartition(":")
        if (shown := metrics_port(config, int(port))) is not None:
            schedulers.append((_at(host, shown), {"service": "scheduler"}))
    jobs.append(_secure(_job("upbeat-scheduler", schedulers), certificates, identity.SCHEDULER.dns))
    for number in range(config.nodes.count):
        places = config.node(number)
        targets = [
            (_at(_host(device.worker_address), device.metrics_port), {"service": "worker", "node": device.name})
            for device in places.devices
        ]
        store = _at(_host(places.store_address), places.store_metrics_port)
        targets.append((store, {"service": "kvstore", "node": places.name}))
        name = identity.node(places.name).dns
        jobs.append(_secure(_job(f"upbeat-{places.name}", targets), certificates, name))
    return {
        "global": {"scrape_interval": every, "evaluation_interval": every},
        "rule_files": [str(ALERTS)],
        "scrape_configs": jobs,
    }


def _job(name: str, targets: list[tuple[str, dict[str, str]]]) -> dict[str, Any]:
    return {"job_name": name, "static_configs": [{"targets": [at], "labels": labels} for at, labels in targets]}


def _secure(job: dict[str, Any], certificates: Path | None, name: str) -> dict[str, Any]:
    if certificates is None:
        return job
    own = certificates / str(OPERATOR)
    files = {"ca_file": "ca.crt", "cert_file": "tls.crt", "key_file": "tls.key"}
    return job | {"scheme": "https", "tls_config": {k: str(own / f) for k, f in files.items()} | {"server_name": name}}


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _at(host: str, port: int) -> str:
    """Where a listener is reached from its own machine."""
    return f"{'127.0.0.1' if host in ('0.0.0.0', '') else '[::1]' if host in ('::', '[::]') else host}:{port}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="the deployment's configuration file")
    parser.add_argument("--data", type=Path, help="the deployment's data directory, if not of the configuration")
    asked = parser.parse_args()
    config = load_config(asked.config, {} if asked.data is None else {"data": str(asked.data)})
    directory = config.tls.directory
    if directory is None and config.tls.automatic:
        directory = config.data / "tls"
    yaml.safe_dump(scrape_config(config, directory), sys.stdout, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
