"""Which runner, kernels and memory a machine has."""
