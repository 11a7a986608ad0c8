"""One attacker: sends generated cases to a gateway and says what was answered wrongly. A program, so that several
attack at a time.

    python -m tests.attack.attacker URL KEY CASES SEED

prints JSON: how many cases, how many answers by status, and the first failures with what was sent.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections import Counter
from typing import Any
from urllib.parse import quote, urlsplit

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from tests.attack.cases import KINDS, OPERATIONS, Case, described

#: The answer of an honest server begins within this time, however busy it is, and is read for so long, up to so many
#: bytes.
TIMEOUT_S, READ_S, READ_BYTES = 60.0, 1.0, 1 << 18
MOST_FAILURES = 12


class Attacker:
    """Sends cases over one connection at a time. failures: what was answered wrongly, in words."""

    def __init__(self, url: str, key: str) -> None:
        self._host, self._port, self._key = str(urlsplit(url).hostname), int(urlsplit(url).port or 80), key
        self._connection: http.client.HTTPConnection | None = None
        self.statuses: Counter[str] = Counter()
        self.failures: list[str] = []
        self.cases = 0

    def send(self, kind: str, case: Case) -> None:
        """Send one and judge its answer."""
        self.cases += 1
        try:
            status, headers, body, whole = self._ask_again_where_the_connection_was_old(case)
        except (OSError, http.client.HTTPException) as e:
            self._hang_up()
            status, headers, body, whole = 0, {}, repr(e).encode(), False
        self.statuses[str(status)] += 1
        wrong = judged(case, status, headers, body, whole)
        if wrong:
            shown = (case.body or b"")[:1500]
            self.failures.append(
                f"{wrong}: {kind}: {case.method} {case.path} {case.headers} {shown!r} -> {status} {body[:300]!r}"
            )

    def _ask_again_where_the_connection_was_old(self, case: Case) -> tuple[int, dict[str, str], bytes, bool]:
        """A server may close a connection between two requests."""
        if self._connection is not None:
            try:
                return self._ask(case)
            except (ConnectionError, http.client.BadStatusLine):
                self._hang_up()
        return self._ask(case)

    def _ask(self, case: Case) -> tuple[int, dict[str, str], bytes, bool]:
        """Status, headers, what was read of the body, and whether that is all of it."""
        connection = self._connection = self._connection or http.client.HTTPConnection(
            self._host, self._port, timeout=TIMEOUT_S
        )
        headers = {"Authorization": f"Bearer {self._key}"} | {
            k: v for k, v in case.headers.items() if k.lower() != "content-length"
        }
        path = quote(case.path, safe="/?&=%:~+;,@!$'()*[]-._")
        connection.request(
            case.method,
            path,
            case.body,
            {k: v.encode("utf-8", "replace").decode("latin-1") for k, v in headers.items()},
        )
        answer = connection.getresponse()
        told = {k.lower(): v for k, v in answer.getheaders()}
        body, whole, deadline = b"", True, time.monotonic() + READ_S
        while piece := answer.read1(1 << 16):
            body += piece
            if case.long and (time.monotonic() > deadline or len(body) > READ_BYTES):
                whole = False
                break
        if whole:
            answer.close()
        if not whole or answer.will_close:
            self._hang_up()
        return answer.status, told, body, whole

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def judged(case: Case, status: int, headers: dict[str, str], body: bytes, whole: bool) -> str:
    """What is wrong with this answer; empty when nothing is."""
    if status == 0:
        # aiohttp ends the connection where a request cannot be told from the next one.
        framed = {"transfer-encoding", "expect", "connection", "content-encoding"} & {
            name.lower() for name in case.headers
        }
        return "" if framed else "no answer"
    if status == 503 and case.path.startswith("/ready"):
        return "not ready"
    if status >= 500 and status != 503:
        return "a server error"
    if status >= 400 and case.method != "HEAD":
        try:
            error = json.loads(body)["error"]
            assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            return "an error without its envelope"
        if status == 503 and (error["code"] not in ("overloaded", "unavailable") or "retry-after" not in headers):
            return "a 503 that is not documented"
    if status == 200 and whole and headers.get("content-type", "").startswith("application/json"):
        try:
            json.loads(body)
        except ValueError:
            return "an answer that is not JSON" if case.method != "HEAD" else ""
    return ""


def attack(attacker: Attacker, cases: int, number: int) -> None:
    """Send about so many cases, of every kind its share; seed: `number`."""
    whole = sum(weight for weight, _ in KINDS.values())
    for kind, (weight, strategy) in KINDS.items():
        wanted = max(1, -(-cases * weight // whole))
        if kind != "described":
            run(attacker, kind, strategy(), wanted, number)
            continue
        modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        each = max(1, -(-wanted // (len(OPERATIONS) * len(modes))))
        for label in OPERATIONS:
            for mode in modes:
                run(
                    attacker,
                    f"{label}, {mode.name.lower()}",
                    lambda label=label, mode=mode: described(label, mode),
                    each,
                    number,
                )  # type: ignore[misc]


def run(attacker: Attacker, kind: str, strategy: Any, cases: int, number: int) -> None:
    """So many cases of one kind. Failures are collected, so that one does not hide the others."""

    @seed(number)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def tried(data: st.DataObject) -> None:
        case = data.draw(strategy() if callable(strategy) else strategy)
        if len(attacker.failures) < MOST_FAILURES:
            attacker.send(kind, case)

    with contextlib.suppress(Unsatisfiable):  # nothing about this operation can be wrong
        tried()
    print(f"{time.strftime('%H:%M:%S')} {kind}: {attacker.cases} cases, {dict(attacker.statuses)}", file=sys.stderr)


def main() -> None:
    """Entry point."""
    url, key, cases, number = sys.argv[1:5]
    attacker = Attacker(url, key)
    attack(attacker, int(cases), int(number))
    print(json.dumps({"cases": attacker.cases, "statuses": attacker.statuses, "failures": attacker.failures}))


if __name__ == "__main__":
    main()
