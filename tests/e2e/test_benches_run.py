"""The benches whose claims stand first still measure what they say: their quick forms on real stacks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(700)]


def result(bench: str, out: Path) -> Any:
    """The result of a bench's quick form."""
    command = [str(ROOT / "bench" / bench / "run"), "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text())


@pytest.mark.sample
def test_a_returning_session_comes_from_the_other_nodes_ssd(tmp_path: Path) -> None:
    shown = result("returning_session", tmp_path / "result.json")["shows"]
    where = [holds for line, holds in shown.items() if " x " not in line and "1/" not in line]  # not how long it took
    assert len(where) == 3 and all(where), shown


def test_answers_with_codecs_come_from_their_files(tmp_path: Path) -> None:
    assert result("codecs", tmp_path / "result.json")["greedy"], "it fails where KV does not come from the SSD alone"
