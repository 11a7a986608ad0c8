"""The devices a worker computes on: runner, kernels and memory of each."""
