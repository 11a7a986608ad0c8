"""Models of the Llama family: weights in device memory, and the forward pass."""
