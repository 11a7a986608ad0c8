"""Reads the keys of a model's config.json: each value is checked, and an error names file, key and value."""

from __future__ import annotations

from typing import Any

from contracts.errors import ConfigError


class Keys:
    """Checked access to the keys of one JSON object. where: its name in messages."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def wrong(self, key: str, remedy: str) -> ConfigError:
        """The error of a key's value; `remedy` ends the sentence."""
        return ConfigError(f"{self.where}: {key} = {self.data.get(key)!r} {remedy}")

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """An integer; `default` stands for a missing key or null. Raises ConfigError, as all of these."""
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be an integer of at least {least}")
        return value

    def number(self, key: str, default: float) -> float:
        """A positive number."""
        value = self.data.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.wrong(key, "must be a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value
