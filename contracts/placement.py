"""When a session leaves the node that has its cache: for one that has so many typical requests less to do. Schedulers
weigh it against other costs (`scheduler/core/terms.py`); gateways that no scheduler answers use the first number
(docs/placement.md)."""

from __future__ import annotations

#: A hinted turn: there is time to move the cache.
LEAVES_CACHE_REQUESTS = 4
#: A turn without a hint: where its cache is not, it is recomputed more often than loaded.
LEAVES_CACHE_UNHINTED_REQUESTS = 16
