"""The log that a link writes to: an event text with fields, the interface of structlog's loggers."""

from __future__ import annotations

import logging
from typing import Protocol


class Log(Protocol):
    """`words` is a constant event text; values are in the fields."""

    def debug(self, words: str, /, **fields: object) -> object:
        """For debugging."""
        ...

    def info(self, words: str, /, **fields: object) -> object:
        """Normal operation."""
        ...

    def warning(self, words: str, /, **fields: object) -> object:
        """The operator may have to act."""
        ...


class PythonLog:
    """A Log over a logger of `logging`, for other engines: fields follow the words as name=value."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, words: str, /, **fields: object) -> None:
        """See `Log`."""
        self._write(logging.DEBUG, words, fields)

    def info(self, words: str, /, **fields: object) -> None:
        """See `Log`."""
        self._write(logging.INFO, words, fields)

    def warning(self, words: str, /, **fields: object) -> None:
        """See `Log`."""
        self._write(logging.WARNING, words, fields)

    def _write(self, level: int, words: str, fields: dict[str, object]) -> None:
        self._logger.log(level, "%s", " ".join([words, *(f"{name}={value!r}" for name, value in fields.items())]))
