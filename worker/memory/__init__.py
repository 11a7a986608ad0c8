"""Device memory as virtual memory: granules of one physical pool, address ranges that they are mapped into, and the paged KV cache."""
