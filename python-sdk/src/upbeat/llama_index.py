"""LlamaIndex: an event handler of its instrumentation that hints the session whose request is being prepared.

A retrieval begins: synthesis follows it. An answer calls tools: their results go to the model. The session is the one
of the enclosing block (`with client.session("chat-7"):`), and `upbeat.event_hooks` names it in the model's requests.
"""

from __future__ import annotations

from typing import Any

from upbeat.client import HintClient
from upbeat.returns import Returns
from upbeat.speaking import current_session

try:
    from llama_index.core.instrumentation import get_dispatcher
    from llama_index.core.instrumentation.event_handlers import BaseEventHandler
    from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent, LLMCompletionStartEvent
    from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent, RetrievalStartEvent
    from llama_index.core.instrumentation.events.span import SpanDropEvent
    from pydantic import PrivateAttr
except ImportError as e:
    raise ImportError("upbeat.llama_index needs LlamaIndex: pip install llama-index-core") from e

MAX_OPEN = 10_000


class UpbeatEventHandler(BaseEventHandler):
    """`UpbeatEventHandler(client).install()`, once. Serves any number of sessions at once."""

    _returns: Returns = PrivateAttr()
    #: Retrievals in progress: span to session.
    _open: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, client: HintClient, *, priority: int = 0) -> None:
        super().__init__()
        self._returns = Returns(client, priority=priority)

    @classmethod
    def class_name(cls) -> str:
        """LlamaIndex's name of the handler."""
        return "UpbeatEventHandler"

    def install(self) -> UpbeatEventHandler:
        """Get the events of the whole process."""
        get_dispatcher().add_event_handler(self)
        return self

    def handle(self, event: Any, **kwargs: Any) -> None:
        """One event of LlamaIndex. Never raises."""
        try:
            self._handle(event)
        except Exception as e:
            self._returns.client.invalid("event", f"an event of LlamaIndex was not understood: {type(e).__name__}: {e}")

    def _handle(self, event: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            self._open.pop(str(event.span_id), None)
        elif isinstance(event, SpanDropEvent):
            # No request follows a retrieval that failed. (A tool's error goes to the model.)
            session_id = self._open.pop(str(event.span_id), None)
            if session_id is not None:
                self._returns.withdraw(session_id)
        elif (session_id := current_session()) is None:
            return
        elif isinstance(event, RetrievalStartEvent):
            if len(self._open) < MAX_OPEN:
                self._open[str(event.span_id)] = session_id
            self._returns.will_ask(session_id, "retrieval")
        elif isinstance(event, (LLMChatStartEvent, LLMCompletionStartEvent)):
            self._returns.asks(session_id)
        elif isinstance(event, LLMChatEndEvent) and calls_tools(event.response):
            self._returns.will_ask(session_id, "tool_calls")


def calls_tools(response: Any) -> bool:
    """Whether a chat's answer calls a tool."""
    message = getattr(response, "message", None)
    if getattr(message, "additional_kwargs", {}).get("tool_calls"):
        return True
    return any(getattr(block, "block_type", "") == "tool_call" for block in getattr(message, "blocks", ()))
