"""Device memory as virtual memory: a ledger of granules, address ranges that map them, and the paged KV cache."""
