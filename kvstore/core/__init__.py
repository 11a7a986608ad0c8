"""The decisions of a node's KV store: synchronous, pure, driven by events."""
