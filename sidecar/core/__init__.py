"""Decisions of the sidecar: pure, synchronous, no HTTP."""
