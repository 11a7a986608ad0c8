"""The runner over the compiled CPU kernels."""
