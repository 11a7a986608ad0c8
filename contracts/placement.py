"""When a session leaves the node that holds its cache: one constant for schedulers and gateways (docs/placement.md)."""

from __future__ import annotations

#: A session moves to a node whose backlog is shorter by this many typical requests.
LEAVES_CACHE_REQUESTS = 4
