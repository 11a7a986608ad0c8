"""LiteLLM, as a library or a proxy: requests to Upbeat name their session, and sessions are hinted where LiteLLM knows
that a request comes.

- The proxy has authenticated a request, and guardrails, limits and routing are still to come: its session is hinted.
- An answer of a chat calls tools: their results come in the session's next request. (After `/v1/responses` and
  `/v1/messages` the gateway hints by itself.)

Only deployments at the gateway's address are touched. Other providers get no header, and their sessions no hint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from upbeat.client import AdvisoryClient, HintClient
from upbeat.names import name_of
from upbeat.returns import Returns
from upbeat.speaking import current_speaker

try:
    import litellm
    from litellm.integrations.custom_logger import CustomLogger
except ImportError as e:
    raise ImportError("upbeat.litellm needs LiteLLM: pip install litellm") from e

#: Headers of a proxy's clients that name the session, as in docs/hints.md.
SESSION_HEADERS = (
    "x-session-id", "x-upbeat-session", "x-openwebui-chat-id", "x-conversation-id", "x-session-affinity",
    "x-opencode-session", "x-chat-id", "x-thread-id", "x-litellm-session-id",
)  # fmt: skip


def session_in(call: Mapping[str, Any]) -> str | None:
    """The session of a LiteLLM call (arguments, a proxy's request, or what loggers get): `X-Session-Id`, the body's
    `session_id`, `litellm_session_id`, `session_id` of the metadata, a header of the proxy's client; else None.

    `user` names nobody's session: a user has many chats.
    """
    inner = _dict(call, "litellm_params")
    for headers in (_dict(call, "extra_headers"), _dict(_dict(call, "optional_params"), "extra_headers")):
        for name, value in headers.items():
            if str(name).lower() == "x-session-id" and value:
                return name_of(str(value))
    said = (
        _dict(call, "extra_body").get("session_id"),
        *(where.get("litellm_session_id") for where in (call, inner)),
        *(_dict(w, m).get("session_id") for w in (call, inner) for m in ("metadata", "litellm_metadata")),
    )
    for value in said:
        if value:
            return name_of(str(value))
    for where in (call, inner):
        headers = {str(k).lower(): v for k, v in _dict(_dict(where, "proxy_server_request"), "headers").items()}
        for name in SESSION_HEADERS:
            if headers.get(name):
                return name_of(str(headers[name]))
    return None


class UpbeatCallback(CustomLogger):
    """`litellm.callbacks = [UpbeatCallback(client)]`, or `callbacks: upbeat.litellm.callback` in a proxy's config.yaml.
    Serves any number of requests at once.

    client: default is one made from UPBEAT_BASE_URL and UPBEAT_API_KEY. api_base: the gateway's address as deployments
    have it, if that differs from the client's. session_of: names a call's session instead of `session_in`.
    """

    def __init__(
        self,
        client: HintClient | None = None,
        *,
        api_base: str | None = None,
        session_of: Callable[[Mapping[str, Any]], str | None] = session_in,
        priority: int = 0,
    ) -> None:
        super().__init__()
        self.client = client if client is not None else AdvisoryClient()
        self._base = (api_base or self.client.base_url).rstrip("/").removesuffix("/v1").lower()
        self._session_of = session_of
        self._returns = Returns(self.client, priority=priority)

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: Any
    ) -> None:
        """The proxy has a request and will send it to a deployment soon."""
        session_id = self._named(data)
        if session_id is not None and self._may_go_to_us(data.get("model")):
            self.client.advise(session_id)

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """An asynchronous call, of the library or the proxy, is about to be sent: name its session."""
        if not self._is_ours(kwargs.get("api_base") or kwargs.get("base_url") or litellm.api_base):
            return None
        session_id, headers = self._headers(kwargs)
        if session_id is not None:
            self._returns.asks(session_id)
        return {**kwargs, "extra_headers": _with(headers, _dict(kwargs, "extra_headers"))} if headers else None

    def log_pre_api_call(self, model: Any, messages: Any, kwargs: dict[str, Any]) -> None:
        """A synchronous call is about to be sent: name its session, in the body that LiteLLM has built."""
        said = _dict(kwargs, "additional_args")
        body = said.get("complete_input_dict")
        if said.get("acompletion") or not isinstance(body, dict) or not self._is_ours(said.get("api_base")):
            return
        session_id, headers = self._headers({**kwargs, "extra_headers": body.get("extra_headers")})
        if session_id is not None:
            self._returns.asks(session_id)
        if headers and "messages" in body:
            body["extra_headers"] = _with(headers, _dict(body, "extra_headers"))

    def log_success_event(self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any) -> None:
        """If the answer calls tools, the session's next request brings their results."""
        if not calls_tools(response_obj) or not self._is_ours(_dict(kwargs, "litellm_params").get("api_base")):
            return
        session_id, _ = self._headers(kwargs)
        if session_id is not None:
            self._returns.will_ask(session_id, "tool_calls")

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """Like `log_success_event`, after an asynchronous call."""
        self.log_success_event(kwargs, response_obj, start_time, end_time)

    def _named(self, call: Mapping[str, Any]) -> str | None:
        try:
            return self._session_of(call)
        except Exception as e:
            self.client.invalid("session_of", f"session_of failed: {type(e).__name__}: {e}")
            return None

    def _headers(self, call: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
        """The session of a call and the headers that name it; else those of the enclosing `client.session`, hop or
        agent."""
        session_id = self._named(call)
        if session_id is not None:
            return session_id, {"X-Session-Id": session_id}
        speaker = current_speaker()
        return (None, {}) if speaker is None else (speaker.session_id, dict(speaker.headers))

    def _is_ours(self, address: object) -> bool:
        said = str(address or "").lower()
        return said.rstrip("/") == self._base or said.startswith(self._base + "/")

    def _may_go_to_us(self, model: object) -> bool:
        """Whether the proxy has a deployment of this model at the gateway."""
        from litellm.proxy import proxy_server

        router = getattr(proxy_server, "llm_router", None)
        deployments = (router.get_model_list(model_name=model) or []) if router is not None and model else []
        return any(self._is_ours(_dict(one, "litellm_params").get("api_base")) for one in deployments)


def calls_tools(answer: Any) -> bool:
    """Whether any choice of a chat's answer calls a tool."""
    return any(
        getattr(getattr(choice, "message", None), "tool_calls", None)
        for choice in getattr(answer, "choices", None) or ()
    )


def _with(headers: dict[str, str], said: dict[str, Any]) -> dict[str, Any]:
    """`said`, and those of `headers` that it lacks."""
    known = {str(name).lower() for name in said}
    return {**{name: value for name, value in headers.items() if name.lower() not in known}, **said}


def _dict(where: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The dictionary under this name, or an empty one."""
    found = where.get(name)
    return found if isinstance(found, dict) else {}


_made: list[UpbeatCallback] = []


def __getattr__(name: str) -> Any:
    """`callback`: for config.yaml, made at its first use from UPBEAT_BASE_URL and UPBEAT_API_KEY."""
    if name != "callback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _made:
        _made.append(UpbeatCallback())
    return _made[0]
