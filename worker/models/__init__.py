"""Models of the Llama family: their configuration, their weights in the device's memory, and their forward pass."""
