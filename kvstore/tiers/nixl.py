"""The one place where NIXL is imported: after its environment is set, so that UCX listens where it was told to.

`nixl_cu12._api` alone is imported, as the package `nixl` imports torch.
"""

from __future__ import annotations

import os
from typing import Any

#: UCX where everything is on one machine: reads of another process's memory, and TCP over loopback to find each other. Its shared
#: memory segments are no faster here, and stay behind in /dev/shm when a process is killed.
_LOOPBACK_TLS = "tcp,self,cma"


def set_environment(interface: str) -> None:
    """Tell UCX its network interface, and both to be quiet. Call before `load` and before any thread starts,
    which may read the environment while it is written; an operator's own UCX_TLS is kept."""
    os.environ["UCX_NET_DEVICES"] = interface
    if interface == "lo":
        os.environ.setdefault("UCX_TLS", _LOOPBACK_TLS)
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def load() -> Any:
    """NIXL's Python API. Raises ImportError where there is no build of it, RuntimeError when the environment was not set."""
    if "UCX_NET_DEVICES" not in os.environ:
        raise RuntimeError("set_environment comes first: UCX would listen on every interface")
    from nixl_cu12 import _api

    return _api
