"""Where a link says what happens to it: whatever takes an event's words and its fields, as structlog's loggers do."""

from __future__ import annotations

import logging
from typing import Protocol


class Log(Protocol):
    """What is written to. The words are the same each time; what differs is in the fields."""

    def debug(self, words: str, /, **fields: object) -> object:
        """Of interest to who looks for a fault."""
        ...

    def info(self, words: str, /, **fields: object) -> object:
        """As it should be."""
        ...

    def warning(self, words: str, /, **fields: object) -> object:
        """Somebody may have to do something."""
        ...


class PythonLog:
    """A Log on a logger of `logging`, as engines have that are not ours: fields follow the words as name=value."""

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
