"""A Prometheus of our own for a while: `with Prometheus(config, directory) as prometheus:`."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import yaml

from loadtest.stack import die_with_parent, free_ports

PROGRAM = "prometheus"
#: What a dashboard's variables stand for: everything.
_EVERYTHING = ".*"
#: What `rate` looks back over. Of at least four scrapes, as Grafana chooses it.
RATE_S = 15
Line = tuple[dict[str, str], list[tuple[float, float]]]


def installed() -> bool:
    """Whether there is a Prometheus."""
    return shutil.which(PROGRAM) is not None


class QueryFailed(RuntimeError):
    """Prometheus refused a query."""


class Prometheus:
    """config: what it scrapes. directory: for its data."""

    def __init__(self, config: dict[str, Any], directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file, self._data = directory / "prometheus.yml", directory / "series"
        self._file.write_text(yaml.safe_dump(config, sort_keys=False))
        self._log = directory / "prometheus.log"
        self.url = ""

    def __enter__(self) -> Prometheus:
        port = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = [
            PROGRAM,
            f"--config.file={self._file}",
            f"--storage.tsdb.path={self._data}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)
        deadline = time.monotonic() + 60
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._end()
                raise RuntimeError(f"Prometheus did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def down(self) -> list[str]:
        """Targets that it could not scrape, with the reason."""
        found = self._ask("targets", {"state": "active"})["activeTargets"]
        return [f"{t['scrapeUrl']}: {t['lastError'] or t['health']}" for t in found if t["health"] != "up"]

    def broken_rules(self) -> list[str]:
        """Alert rules that it could not evaluate, with the reason."""
        rules = [rule for group in self._ask("rules", {})["groups"] for rule in group["rules"]]
        assert rules, "no rules were read"
        return [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] == "err"]

    def lines(self, query: str, from_s: float, to_s: float, step_s: float = 1.0) -> list[Line]:
        """What a panel would draw of a query without variables: labels, and (Unix time, value); only lines with a value
        that is a number. Raises QueryFailed."""
        asked = {"query": query, "start": f"{from_s}", "end": f"{to_s}", "step": f"{step_s}"}
        found = []
        for each in self._ask("query_range", asked)["result"]:
            points = [(float(at), float(value)) for at, value in each["values"]]
            if any(math.isfinite(value) for _, value in points):
                found.append((each["metric"], points))
        return found

    def _ask(self, what: str, asked: dict[str, str]) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(asked)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                told: dict[str, Any] = json.load(answer)["data"]
        except urllib.error.HTTPError as e:
            raise QueryFailed(f"{asked.get('query', what)}: {e.read().decode(errors='replace')}") from None
        return told


def filled_in(expr: str, chosen: Mapping[str, str] = MappingProxyType({})) -> str:
    """A dashboard's query with its variables filled in. chosen: values by variable; others match everything."""
    expr = re.sub(r"\$(__rate_interval|__range)\b", f"{RATE_S}s", expr)
    return re.sub(r'"\$(\w+)"', lambda found: f'"{chosen.get(found[1], _EVERYTHING)}"', expr)
