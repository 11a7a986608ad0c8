"""Hints for Upbeat: announce a session's next request, so that its KV cache is loaded before the request arrives.

Framework hooks are separate modules: `upbeat.openai_agents`, `upbeat.langgraph`, `upbeat.crewai`,
`upbeat.agent_framework`, `upbeat.litellm`, `upbeat.llama_index`; `upbeat.mcp` is a server. This package has no
dependencies.
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
