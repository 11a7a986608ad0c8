"""The command line and the environment of a device's vLLM server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: The program: `vllm serve` as a module, which also the CPU's build starts.
MODULE = "vllm.entrypoints.openai.api_server"
#: What the sidecar reads every second; the server's log need not say so.
WATCHED = ("/health", "/metrics")
#: vLLM fetches the images that a request names, from wherever the server can reach. By default no request may name one:
#: this domain cannot exist, and vLLM's refusal shows it. Images within requests (data: URLs) are not concerned.
MEDIA, NO_MEDIA_DOMAIN = "--allowed-media-domains", "data-urls-only.invalid"
#: Variables of our own environment that would change what the server imports.
_NOT_PASSED = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")


@dataclass(frozen=True, slots=True)
class Served:
    """What a server serves. model: a directory, or a repository of the hub with its `revision`. name: in the API.
    dtype: auto: vLLM chooses. kv_bytes: memory for its KV; None: vLLM chooses. transfer: the connector's configuration;
    None: it has none. chunk_tokens: of a block, if it has a connector. arguments: the operator's; they win."""

    model: str
    revision: str | None
    name: str
    dtype: str
    chunk_tokens: int
    kv_bytes: int | None
    transfer: Mapping[str, Any] | None
    arguments: Sequence[str]

    @property
    def is_local(self) -> bool:
        """Whether it is a directory."""
        return self.model.startswith("/")


def command(python: str, socket: str, served: Served) -> list[str]:
    """The server's command line. socket: where it listens."""
    line = [python, "-m", MODULE, "--model", served.model, "--served-model-name", served.name, "--uds", socket]
    if served.revision is not None:
        line += ["--revision", served.revision]
    # The context is the model's, or what its memory for KV holds: a server without room for a whole one does not start.
    line += ["--scheduling-policy", "priority", "--max-model-len", "auto", "--dtype", served.dtype]
    line += ["--disable-access-log-for-endpoints", ",".join(WATCHED)]
    if served.kv_bytes is not None:
        line += ["--kv-cache-memory-bytes", str(served.kv_bytes)]
    if served.transfer is not None:
        line += ["--block-size", str(served.chunk_tokens), "--kv-transfer-config", json.dumps(served.transfer)]
    if not any(argument.partition("=")[0] == MEDIA for argument in served.arguments):
        line += [MEDIA, NO_MEDIA_DOMAIN]
    return [*line, *served.arguments]


def environment(base: Mapping[str, str], key: str, served: Served) -> dict[str, str]:
    """The server's environment. base: this process's, whose settings of Upbeat (with callers' keys) it does not need.
    key: of its API; a command line would show it to every user."""
    passed = {name: value for name, value in base.items() if name not in _NOT_PASSED and not name.startswith("UPBEAT_")}
    passed |= {"VLLM_API_KEY": key, "VLLM_NO_USAGE_STATS": "1"}
    if served.is_local:
        passed["HF_HUB_OFFLINE"] = "1"
    return passed
