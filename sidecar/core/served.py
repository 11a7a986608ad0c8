"""What a vLLM server says that it serves, and the smallest request that it can be given."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sidecar.core.routes import Route


class Unfit(Exception):
    """The server cannot be a node's; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Facts:
    """max_tokens: longest prompt plus answer. root: the weights' directory or repository, as the server was told."""

    max_tokens: int
    root: str


def facts_of(status: int, answer: bytes, model: str) -> Facts:
    """From the answer of GET /v1/models. Raises Unfit when the key is refused, or the model is not served."""
    if status == 401:
        raise Unfit(
            "it refuses our API key; set vllm.api_key_env (--api-key-env) to the variable that holds the server's"
        )
    try:
        models = json.loads(answer)["data"] if status == 200 else None
        known = {str(m["id"]): m for m in models or ()}
    except (ValueError, KeyError, TypeError, RecursionError):
        known = {}
    if not known:
        raise Unfit(f"GET /v1/models answered {status} and no list of models; is it a vLLM server?")
    if model not in known:
        raise Unfit(
            f"it serves {', '.join(known)}, not {model!r}; start it with --served-model-name {model}, or give another "
            "--model"
        )
    longest = known[model].get("max_model_len")
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise Unfit(f"GET /v1/models says no max_model_len of {model!r}; is it a vLLM server?")
    return Facts(longest, str(known[model].get("root") or ""))


def one_token(model: str, routes: Mapping[str, Route], priority: int | None) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request that makes the engine step once. priority: None: the server's usual. Raises Unfit when
    no route allows one."""
    said = {"model": model} if priority is None else {"model": model, "priority": priority}
    if "/v1/completions" in routes:
        return "/v1/completions", said | {"prompt": [0], "max_tokens": 1}
    if "/v1/embeddings" in routes:
        return "/v1/embeddings", said | {"input": [0]}
    raise Unfit("it has neither POST /v1/completions nor POST /v1/embeddings")
