"""Which session a call belongs to, by LangChain's configuration."""

from __future__ import annotations

from typing import Any

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config
from upbeat.names import name_of
from upbeat.speaking import current_speaker


def configured_session(config: RunnableConfig | None = None) -> str | None:
    """`session_id` of the configurable values of `config` and of the chain around this code; else `thread_id`, unless
    an agent's hook (`upbeat.langgraph`) names the session; else None."""
    configurable: dict[str, Any] = ensure_config(config).get("configurable", {})
    said = configurable.get("session_id")
    if not said and current_speaker() is None:
        said = configurable.get("thread_id")
    return name_of(str(said)) if said else None
