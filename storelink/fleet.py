"""Which fleet a process belongs to: the id of its cluster secret goes with each of its calls, and servers refuse those
of another fleet (`runtime.same_secret`). Processes with different secrets would share no KV and say nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import grpc

from contracts.errors import ConfigError

#: Metadata of a call. Not sent by processes that do not know the secret, such as an operator's command line.
HEADER = "upbeat-secret-id"
_ID = re.compile("[0-9a-f]{16}")
_WORDS = "the cluster secret differs"


class SecretDiffers(ConfigError):
    """The process that was called has another cluster secret than the one that called."""


def _unknown() -> str:
    return ""


_read: Callable[[], str] = _unknown


def use(read: Callable[[], str]) -> None:
    """From now on this process shows what `read` returns: the id of its cluster secret, empty while it has none."""
    global _read
    _read = read


def own_id() -> str:
    """The id of this process's cluster secret; empty: it has none."""
    return _read()


def said_id(metadata: Any) -> str:
    """The id in a call's metadata; empty: none, or no id."""
    for name, value in metadata or ():
        if name == HEADER and isinstance(value, str) and _ID.fullmatch(value):
            return value
    return ""


def difference(caller_id: str, here: str, here_id: str) -> str:
    """For the caller: what is wrong, and the remedy. here: who refuses."""
    return (
        f"{_WORDS}: its id is {caller_id} in the caller's DATA/secret and {here_id} at {here}; copy the file "
        "DATA/secret of the fleet into the data directory here (`data`) and start again"
    )


def refusal(error: grpc.RpcError) -> SecretDiffers | None:
    """The error if a call was refused for its secret."""
    details = str(error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else ""
    if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return SecretDiffers(details[:600]) if details.startswith(_WORDS) else None
    return None
