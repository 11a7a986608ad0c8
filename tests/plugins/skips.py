"""No test is skipped silently: every reason is printed at the end, and one that is not listed here fails the run.

A reason is allowed where a machine may really lack something. What a test merely does not apply to is not generated in
the first place.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

#: What a reason must match, whole; and what makes such a test run.
ALLOWED = {
    r"Azure's emulator is not installed: make azurite": "make azurite",
    r"LangGraph passes no context to tasks there": "Python 3.11",
    r"could not import 'crewai': .*": "make sdk-frameworks",
    r"could not import '(litellm|llama_index\.core)': .*": "make hooks-test",
    r"Model is not serializable\.": "LangChain, which loads only classes of its own list",
    r"`make sdk-venv` makes the environment with the agent frameworks": "make sdk-venv",
    r"needs (node|web-sdk/node_modules|Chromium)\b.*": "npm and Chromium, which .ci/run installs",
    r"needs (tests/recipes/node_modules|\.cache/gradio)\b.*": "make recipes",
    r"node or its client is not there; .*": "npm, which .ci/run installs",
    r"the frameworks are not there; `make clients` installs them": "make clients",
    r"the frameworks are not there; `make proxy` installs them": "make proxy",
    r"the extra \[lmcache\] is not installed": "a machine for which LMCache has a build",
    r"LMCache's kernels need numba .*|lmcache\S* cannot be imported .*": "the whole of LMCache",
    r"Triton has no build for this machine": "x86",
    r"needs a CUDA device|no CUDA device": "make gpu",
    r"needs two CUDA devices": "make gpu on a machine with several",
    r"there is a CUDA device|GDS may work here": "a machine without one: what is tested is what happens then",
    r"there is no compiler": "cc",
    r"names of x86 processors|this processor (does not|has no) .*|needs a processor with .*": "another processor",
    r"no cross-compiler or no emulator .*": "what it names",
    r"only root can be another user": "root",
    r"this checkout does not have the commit .*": "a clone with its history",
    r"only root may mount a file system|this machine does not let a test mount a file system: .*": "root",
    r"mounting .* is not permitted here: .*": "root",
    r"the pool of huge pages cannot be changed here: .*": "root",
    r"the machine (gave \d+ of \d+ huge pages|denies huge pages to every tmpfs)": "free memory, and a kernel that "
    "gives huge pages",
    r"this kernel or file system does not say what its page cache holds": "another file system",
    r"this account may open only \d+ files": "ulimit -n",
    r"Helm is not there; `make helm` fetches it": "make helm, on x86-64 Linux",
    r"containers cannot be brought up here: .*": "root, podman, runc and debootstrap",
    r"Prometheus is not installed: apt-get install prometheus": "what it names, as .ci/run does",
    r"network namespaces are not to be had here: .*": "root and ip",
    r"the disk cannot be slowed: .*|.* is on no disk that the kernel could slow; .*": "root and control groups, "
    "and /tmp on a disk",
    r"links cannot be slowed here: .*|this kernel delays no packets: .*": "root and tc, and a kernel with netem",
}


def judged(reasons: Counter[str]) -> tuple[list[str], list[str]]:
    """Lines about the skips that are allowed, and about those that are not."""
    allowed, others = [], []
    for reason, count in sorted(reasons.items()):
        remedy = next((remedy for pattern, remedy in ALLOWED.items() if re.fullmatch(pattern, reason, re.DOTALL)), None)
        (others if remedy is None else allowed).append(
            f"{count} x {reason}" + (f" (to run it: {remedy})" if remedy else "")
        )
    return allowed, others


def _skipped(config: pytest.Config) -> Counter[str]:
    """How often which reason; nothing in a process of pytest-xdist, which reports to another one."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found: Counter[str] = Counter()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        said = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found[said.removeprefix("Skipped: ")] += 1
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if (
        session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        and judged(_skipped(session.config))[1]
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    allowed, others = judged(_skipped(terminalreporter.config))
    if allowed:
        terminalreporter.section("skipped, as tests/plugins/skips.py allows")
        terminalreporter.write("\n".join(allowed) + "\n")
    if others:
        terminalreporter.section("skipped, and not allowed: the run has failed", red=True)
        terminalreporter.write("\n".join(others) + "\n", red=True)
