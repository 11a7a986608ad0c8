"""The runner that uses the compiled CPU kernels."""
