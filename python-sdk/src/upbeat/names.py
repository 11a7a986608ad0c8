"""Names as the server takes them: sessions, workflows, agents, runs; and a hop, which is one agent's place in one run.

A hint and the request that it announces meet only when both spell the session alike. So it is spelled here, once: `RUN:AGENT`.
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
    """Whether the server would take `value` as a session id, or as the name of a workflow, an agent or a run."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None and _ONLY_DOTS.fullmatch(value) is None


def name_of(text: str) -> str:
    """A legal name for any text: itself where it is one, `Fact-Checker` for `Fact Checker`, else with a hash, so that no two texts meet."""
    if is_name(text):
        return text
    spaced = "-".join(text.split(" "))
    if is_name(spaced):
        return spaced
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{_ILLEGAL.sub('-', text)[: MAX_NAME_CHARS - 17]}-{digest}"


@dataclass(frozen=True)
class Hop:
    """One agent in one run of a workflow. Any texts will do: they become legal names."""

    workflow: str
    agent: str
    run: str

    def __post_init__(self) -> None:
        for field in ("workflow", "agent", "run"):
            object.__setattr__(self, field, name_of(getattr(self, field)))

    @property
    def session_id(self) -> str:
        """The session of this agent's thread in this run."""
        return name_of(f"{self.run}:{self.agent}")

    @property
    def headers(self) -> dict[str, str]:
        """What its requests carry, so that the server knows session, workflow, agent and run."""
        return {
            "X-Session-Id": self.session_id,
            "X-Upbeat-Workflow": self.workflow,
            "X-Upbeat-Agent": self.agent,
            "X-Upbeat-Run": self.run,
        }
