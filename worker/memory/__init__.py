"""Device memory as virtual memory: granules of one ledger, address ranges that they are mapped into, and the paged KV cache."""
