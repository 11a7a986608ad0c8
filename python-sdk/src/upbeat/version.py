"""The distribution's version, which pyproject.toml reads here."""

VERSION = "0.1.0"
