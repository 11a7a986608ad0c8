"""Compiled kernels for the CPU: where their sources are, how they are built, and how they are called."""
