"""Compute kernels: sources, build and calls of the compiled CPU kernels, and Triton kernels for CUDA."""
