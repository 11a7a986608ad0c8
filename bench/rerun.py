"""Measures the claims of docs/evidence.md again and prints each beside its committed figure: `make evidence`.

Commands run one after the other, in the document's order, each if the time that it needs is left. Results are in
`.cache/evidence/`, never over committed ones. A claim is `repeated` if both intervals overlap; with different verdicts
of two figures that both decide, it is `CONTRADICTED`, and the exit status is 1.

    .venv/bin/python bench/rerun.py --list       # what would run, and what is left out, and why
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from claim import Claim
from claimed import claims
from evidence import figure
from intervals import Estimate, holds
from rich.console import Console
from rich.table import Table
from write_figures import ROOT, read

FOLDER = ROOT / ".cache" / "evidence"


@dataclass(frozen=True, slots=True)
class Job:
    """A command and the claims that its result decides. left_out: why it does not run; empty: it does."""

    command: str
    result: str
    minutes: int
    claims: tuple[Claim, ...]
    left_out: str = ""

    @property
    def out(self) -> Path:
        """The file of its result."""
        return FOLDER / self.result.replace("/", "-")


def jobs(of: Sequence[Claim], minutes: float, only: str, missing: dict[str, str]) -> list[Job]:
    """A job for each result in the order of the claims; those that do not fit `minutes` or lack something left out.

    missing: by what a claim needs, why this machine lacks it.
    """
    found: dict[tuple[str, str], list[Claim]] = {}
    for claim in of:
        if only in claim.result:
            found.setdefault((claim.command, claim.result), []).append(claim)
    made, left = [], minutes
    for (command, result), held in found.items():
        job = Job(command, result, held[0].minutes, tuple(held))
        lacks = [why for need, why in missing.items() if need in held[0].needs]
        if not lacks and job.minutes > left:
            lacks = [f"needs about {job.minutes} minutes, {max(0.0, left):.0f} are left"]
        if not lacks:
            left -= job.minutes
        made.append(replace(job, left_out="; ".join(lacks)))
    return made


def traces() -> Path:
    """The folder of traces: that of UPBEAT_TRACE."""
    return Path(os.environ.get("UPBEAT_TRACE", ".")).absolute().parent


def missing_here(of: Sequence[Claim], folder: Path) -> dict[str, str]:
    """What claims may need and this machine lacks. folder: of traces."""
    names = {name for claim in of for name in re.findall(r"--trace (\S+)", claim.command)}
    found = {name: f"{name} is not beside UPBEAT_TRACE" for name in names if not (folder / name).is_file()}
    if not (ROOT / ".cache" / "vllm" / "bin" / "python").exists():
        found["make vllm"] = "vLLM is not there; `make vllm` installs it"
    if os.geteuid() != 0:
        found["root"] = "root is needed to slow disks"
    if shutil.which("nvidia-smi") is None:
        found["GPU"] = "there is no NVIDIA GPU"
    return found


def run(job: Job, folder: Path, limit_s: float) -> str:
    """Run a job's command; returns what went wrong, empty if it left a result."""
    job.out.parent.mkdir(parents=True, exist_ok=True)
    job.out.unlink(missing_ok=True)
    words = shlex.split(job.command)
    words = [str(folder / w) if before == "--trace" else w for before, w in zip(["", *words], words, strict=False)]
    with job.out.with_suffix(".log").open("wb") as log:
        try:
            done = subprocess.run(
                [str(ROOT / words[0]), *words[1:], "--out", str(job.out)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"did not end within {limit_s / 60:.0f} minutes"
    return "" if job.out.exists() else f"status {done.returncode}, no result; see {job.out.with_suffix('.log')}"


def judged(claim: Claim, then: Estimate, now: Estimate) -> str:
    """Whether a figure was repeated."""
    before, after = (holds(of, claim.bound, below=claim.below) for of in (then, now))
    if None not in (before, after) and before != after:
        return "CONTRADICTED"
    return "repeated" if now.low <= then.high and then.low <= now.high else "other figure, same verdict"


def shown(of: Estimate) -> str:
    return f"{of.value:.3f} ({of.low:.3f} to {of.high:.3f}{'' if of.decides else ', range'})"


def main() -> int:
    given = arguments()
    folder = traces()
    console = Console(width=160, soft_wrap=True, highlight=False)
    todo = jobs(claims(), given.minutes, given.only, missing_here(claims(), folder))
    for job in todo:
        console.print(f"{job.command}: {job.left_out or f'about {job.minutes} minutes'}")
    if given.list:
        return 0
    table = Table("claim", "committed", "now", "", title="docs/evidence.md, measured again", title_justify="left")
    contradicted, began_s = False, time.monotonic()
    for job in (job for job in todo if not job.left_out):
        console.print(f"{time.monotonic() - began_s:6.0f} s: {job.command}")
        wrong = run(job, folder, 60.0 * job.minutes * given.patient)
        document = {} if wrong else read(job.out)
        for claim in job.claims:
            then, _ = figure(claim)
            now = None if wrong else claim.of(document)
            said = wrong if now is None else judged(claim, then, now)
            contradicted |= said == "CONTRADICTED"
            table.add_row(claim.says, shown(then), "-" if now is None else shown(now), said)
    console.print(table)
    console.print(f"results and logs: {FOLDER}")
    return int(contradicted)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="only as much as fits (60)")
    parser.add_argument("--only", default="", help="only results whose path contains this")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--patient", type=float, default=3.0, help="a command may take so many times its minutes (3)")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; results so far are in .cache/evidence")
