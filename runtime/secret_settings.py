"""Which settings are secrets, and which program needs them. The launcher writes one configuration without secrets for
all processes, and a file with its own secrets for each program that has some (`--secrets`)."""

from __future__ import annotations

import secrets
from typing import Any

from pydantic import BaseModel

from contracts.api_keys import digest
from runtime.config import Config
from runtime.config_file import with_hashed_keys


def public(config: Config) -> Config:
    """`config` without secrets. It has as many API keys, of the same tenants, that nobody knows."""
    keys = [
        key.model_copy(update={"key": f"sha256:{digest(secrets.token_urlsafe(32)).hex()}"})
        for key in config.gateway.api_keys
    ]
    sections: dict[str, tuple[BaseModel, dict[str, Any]]] = {
        "gateway": (config.gateway, {"api_keys": keys, "token_secret": ""}),
        "kv": (config.kv, {"blob_options": {}}),
        "vllm": (config.vllm, {"api_key": ""}),
    }
    return config.model_copy(
        update={name: section.model_copy(update=hidden) for name, (section, hidden) in sections.items()}
    )


def secrets_of(program: str, config: Config) -> dict[str, Any]:
    """The secret settings that a program needs, nested like the configuration; empty: none."""
    if program == "upbeat-gateway":
        said = with_hashed_keys(config).gateway
        keys = [key.model_dump() for key in said.api_keys]
        found: dict[str, Any] = ({"api_keys": keys} if keys else {}) | (
            {"token_secret": said.token_secret} if said.token_secret else {}
        )
        return {"gateway": found} if found else {}
    if program == "upbeat-kvstore" and config.kv.blob_options:
        return {"kv": {"blob_options": dict(config.kv.blob_options)}}
    if program == "upbeat-sidecar" and config.vllm.api_key:
        return {"vllm": {"api_key": config.vllm.api_key}}
    return {}
