"""Names that the server accepts for sessions, workflows, agents and runs; and `Hop`, one agent in one run.

A hint and its request must name the same session, so an agent's session id is built only here: `RUN:AGENT`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ONLY_DOTS = re.compile(r"\.+")
_ILLEGAL = re.compile(r"[^A-Za-z0-9._:-]+")


def is_name(value: object) -> bool:
    """Whether the server accepts `value` as a session id, or as the name of a workflow, an agent or a run."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and _ONLY_DOTS.fullmatch(value) is None


def name_of(text: str) -> str:
    """A legal name for any text: unchanged if legal, else with spaces as hyphens (`Fact-Checker`), else with a hash of
    the text."""
    if is_name(text):
        return text
    spaced = "-".join(text.split(" "))
    if is_name(spaced):
        return spaced
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{_ILLEGAL.sub('-', text)[: MAX_NAME_CHARS - 17]}-{digest}"


@dataclass(frozen=True)
class Hop:
    """One agent in one run of a workflow. Texts are converted to legal names (`name_of`)."""

    workflow: str
    agent: str
    run: str

    def __post_init__(self) -> None:
        for field in ("workflow", "agent", "run"):
            object.__setattr__(self, field, name_of(getattr(self, field)))

    @property
    def session_id(self) -> str:
        """The session id of this agent in this run."""
        return name_of(f"{self.run}:{self.agent}")

    @property
    def headers(self) -> dict[str, str]:
        """Request headers that name the session, workflow, agent and run."""
        return {
            "X-Session-Id": self.session_id,
            "X-Upbeat-Workflow": self.workflow,
            "X-Upbeat-Agent": self.agent,
            "X-Upbeat-Run": self.run,
        }
