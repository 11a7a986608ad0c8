"""A callback that hints a chain's session when a retriever or a tool begins: its result goes into the next request."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler

from langchain_upbeat.chat_models import ChatUpbeat
from langchain_upbeat.sessions import configured_session


class SessionHints(BaseCallbackHandler):
    """`chain.invoke(x, {"callbacks": [SessionHints(chat)], "configurable": {"session_id": "chat-7"}})`. Serves any
    number of runs at once. The session is the configured one, else that of `chat`."""

    #: Run in the chain's context, which has the session; takes microseconds.
    run_inline = True
    raise_error = False

    def __init__(self, chat: ChatUpbeat) -> None:
        super().__init__()
        self._chat = chat
        #: Retrievals in progress: callback run id to session.
        self._open: dict[UUID, str] = {}

    def on_tool_start(self, serialized: Any, input_str: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._begins(serialized, kwargs)

    def on_retriever_start(self, serialized: Any, query: str, *, run_id: UUID, **kwargs: Any) -> None:
        session_id = self._begins(serialized, kwargs)
        if session_id is not None and len(self._open) < 10_000:
            self._open[run_id] = session_id

    def on_retriever_end(self, documents: Any, *, run_id: UUID, **kwargs: Any) -> None:
        self._open.pop(run_id, None)

    def on_retriever_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """No request follows a retrieval that failed. (A tool's error goes to the model.)"""
        session_id = self._open.pop(run_id, None)
        if session_id is not None:
            self._chat.returns.withdraw(session_id)

    def _begins(self, serialized: Any, said: dict[str, Any]) -> str | None:
        session_id = configured_session() or self._chat.session_id
        if session_id is not None:
            self._chat.returns.will_ask(session_id, str(said.get("name") or (serialized or {}).get("name") or "step"))
        return session_id
