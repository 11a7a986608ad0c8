"""LangChain's own unit tests of a chat model."""

from __future__ import annotations

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from langchain_upbeat import ChatUpbeat


class TestChatUpbeat(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatUpbeat

    @property
    def chat_model_params(self) -> dict[str, object]:
        return {"model": "upbeat-demo", "base_url": "http://127.0.0.1:9/v1", "api_key": "key"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, object], dict[str, object]]:
        environment = {"UPBEAT_BASE_URL": "http://127.0.0.1:9", "UPBEAT_API_KEY": "key-of-the-environment"}
        expected = {"openai_api_base": "http://127.0.0.1:9/v1", "openai_api_key": "key-of-the-environment"}
        return environment, {"model": "upbeat-demo"}, expected
