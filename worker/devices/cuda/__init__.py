"""The runner for CUDA devices."""
