"""`ChatUpbeat`: ChatOpenAI whose requests name their session, and whose sessions are hinted after answers that call
tools."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_openai import ChatOpenAI
from pydantic import Field, PrivateAttr, SecretStr, model_validator
from typing_extensions import Self
from upbeat import AdvisoryClient, HintClient
from upbeat.names import name_of
from upbeat.returns import Returns
from upbeat.speaking import current_speaker

from langchain_upbeat.sessions import configured_session

SESSION_HEADER = "X-Session-Id"


class ChatUpbeat(ChatOpenAI):
    """`ChatUpbeat(model="upbeat-demo")`. base_url: default UPBEAT_BASE_URL; api_key: default UPBEAT_API_KEY, else none.

    The session of a call is the first of: the argument `session_id` (`chat.invoke(x, session_id="chat-7")`), the
    model's `session_id`, `session_id` of the configurable values, the agent that a hook of `upbeat` has named,
    `thread_id` of the configurable values. Without any the gateway recognises the history.
    """

    #: The session of every call that names no other.
    session_id: str | None = None
    #: After an answer that calls tools, hint the session: their results come in its next request.
    hints: bool = True
    #: Of the hints: lower is more urgent.
    hint_priority: int = 0
    #: Sends the hints. Default: one a gateway and key.
    hint_client: Any = Field(default=None, exclude=True)
    _returns: Returns = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _take_upbeats_defaults(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = dict(values)
        if not (given.get("base_url") or given.get("openai_api_base")):
            address = os.environ.get("UPBEAT_BASE_URL")
            if not address:
                raise ValueError("base_url is missing: give the gateway's address, or set UPBEAT_BASE_URL")
            given["base_url"] = address.rstrip("/").removesuffix("/v1") + "/v1"
        if not (given.get("api_key") or given.get("openai_api_key")):
            given["api_key"] = SecretStr(os.environ.get("UPBEAT_API_KEY") or "none")
        # The gateway has it for every model.
        given.setdefault("stream_usage", True)
        return given

    @model_validator(mode="after")
    def _connect(self) -> Self:
        if self.hint_client is not None and not isinstance(self.hint_client, HintClient):
            raise ValueError("hint_client must be an upbeat.AdvisoryClient or upbeat.AsyncAdvisoryClient")
        client = self.hint_client
        if client is None:
            key = self.openai_api_key
            said = key.get_secret_value() if isinstance(key, SecretStr) else os.environ.get("UPBEAT_API_KEY", "")
            client = _client(str(self.openai_api_base), "" if said == "none" else said)
        self._returns = Returns(client, priority=self.hint_priority)
        return self

    @property
    def returns(self) -> Returns:
        """Hints of this model's sessions, with the delays learned so far."""
        return self._returns

    def advise(self, session_id: str, **hint: Any) -> None:
        """This session is about to ask: the user has begun to type. hint: arguments of `AdvisoryClient.advise`."""
        self._returns.client.advise(session_id, **hint)

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> AIMessage:
        return super().invoke(input, config, **self._told(config, kwargs))

    async def ainvoke(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AIMessage:
        return await super().ainvoke(input, config, **self._told(config, kwargs))

    def stream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Iterator[AIMessageChunk]:
        yield from super().stream(input, config, **self._told(config, kwargs))

    async def astream(
        self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any
    ) -> AsyncIterator[AIMessageChunk]:
        async for chunk in super().astream(input, config, **self._told(config, kwargs)):
            yield chunk

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        session_id = self._asks(kwargs)
        result = super()._generate(messages, stop, run_manager, **kwargs)
        self._answered(session_id, _calls_tools(result))
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        session_id = self._asks(kwargs)
        result = await super()._agenerate(messages, stop, run_manager, **kwargs)
        self._answered(session_id, _calls_tools(result))
        return result

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        session_id, calls = self._asks(kwargs), False
        for chunk in super()._stream(*args, **kwargs):
            calls = calls or bool(getattr(chunk.message, "tool_call_chunks", None))
            yield chunk
        self._answered(session_id, calls)

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        session_id, calls = self._asks(kwargs), False
        async for chunk in super()._astream(*args, **kwargs):
            calls = calls or bool(getattr(chunk.message, "tool_call_chunks", None))
            yield chunk
        self._answered(session_id, calls)

    def _get_request_payload(
        self, input_: LanguageModelInput, *, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        headers = self._headers(kwargs)
        kwargs.pop("session_id", None)
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        if headers:
            said = payload.get("extra_headers") or {}
            known = {name.lower() for name in said}
            payload["extra_headers"] = {n: v for n, v in headers.items() if n.lower() not in known} | said
        return payload

    def _told(self, config: RunnableConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call, with the configured session if they and the model name none."""
        if kwargs.get("session_id") or self.session_id:
            return kwargs
        session_id = configured_session(config)
        return kwargs if session_id is None else {**kwargs, "session_id": session_id}

    def _headers(self, kwargs: dict[str, Any]) -> dict[str, str]:
        session_id = kwargs.get("session_id") or self.session_id
        if session_id:
            return {SESSION_HEADER: name_of(str(session_id))}
        speaker = current_speaker()
        return {} if speaker is None else dict(speaker.headers)

    def _asks(self, kwargs: dict[str, Any]) -> str | None:
        """The session that asks now, or None."""
        headers = self._headers(kwargs) | (kwargs.get("extra_headers") or {})
        session_id = next((v for n, v in reversed(headers.items()) if n.lower() == SESSION_HEADER.lower()), None)
        if session_id is not None:
            self._returns.asks(session_id)
        return session_id

    def _answered(self, session_id: str | None, calls_tools: bool) -> None:
        if self.hints and calls_tools and session_id is not None:
            self._returns.will_ask(session_id, "tool_calls")

    @property
    def _llm_type(self) -> str:
        return "upbeat-chat"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        kwargs.pop("session_id", None)
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_provider": "upbeat"}

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """False: LangChain's `load` takes only classes of its own list."""
        return False


@lru_cache(maxsize=64)
def _client(base_url: str, api_key: str) -> AdvisoryClient:
    """One background thread a gateway and key."""
    return AdvisoryClient(base_url, api_key)


def _calls_tools(result: ChatResult) -> bool:
    return any(getattr(one.message, "tool_calls", None) for one in result.generations)
