"""The only place that imports NIXL, after setting its environment, so that UCX listens only where configured.

Imports `nixl_cu12._api`, because the package `nixl` imports torch.
"""

from __future__ import annotations

import os
from typing import Any

#: UCX within one machine: CMA reads, and TCP over loopback to connect. Shared memory segments are no faster, and remain
#: in /dev/shm when a process is killed.
_LOOPBACK_TLS = "tcp,self,cma"


def set_environment(interface: str) -> None:
    """Set UCX's network interface, and quiet both libraries. Call before `load` and before any thread starts, because
    threads may read the environment meanwhile. An existing UCX_TLS is kept."""
    os.environ["UCX_NET_DEVICES"] = interface
    if interface == "lo":
        os.environ.setdefault("UCX_TLS", _LOOPBACK_TLS)
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def load() -> Any:
    """NIXL's Python API. Raises ImportError where it is not installed, RuntimeError when the environment was not
    set."""
    if "UCX_NET_DEVICES" not in os.environ:
        raise RuntimeError("set_environment comes first: UCX would listen on every interface")
    from nixl_cu12 import _api

    return _api
