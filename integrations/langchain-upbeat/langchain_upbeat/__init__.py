"""LangChain's chat model for Upbeat."""

from langchain_upbeat.callbacks import SessionHints
from langchain_upbeat.chat_models import ChatUpbeat

__all__ = ["ChatUpbeat", "SessionHints"]
