"""Models of the Llama family: their configuration, their weights in the granule pool, and their forward pass."""
