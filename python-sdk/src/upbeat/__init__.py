"""Hints for Upbeat: say that a session is about to ask, and its KV cache is there when it does.

Hooks for frameworks are modules of their own, imported by name: `upbeat.openai_agents`, `upbeat.langgraph`, `upbeat.crewai`,
`upbeat.agent_framework`. This package itself needs nothing but Python.
"""

from upbeat.client import AdvisoryClient, AsyncAdvisoryClient, ConfigurationError, HintClient, Turn
from upbeat.names import Hop, is_name, name_of
from upbeat.sender import Counters
from upbeat.speaking import async_event_hooks, current_session, event_hooks, in_run, speaking_as
from upbeat.steps import Step, retriever, tool
from upbeat.version import VERSION as __version__
from upbeat.workflow import Workflow

__all__ = [
    "AdvisoryClient",
    "AsyncAdvisoryClient",
    "ConfigurationError",
    "Counters",
    "HintClient",
    "Hop",
    "Step",
    "Turn",
    "Workflow",
    "__version__",
    "async_event_hooks",
    "current_session",
    "event_hooks",
    "in_run",
    "is_name",
    "name_of",
    "retriever",
    "speaking_as",
    "tool",
]
