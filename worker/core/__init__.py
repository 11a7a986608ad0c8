"""Decisions of the worker: pure, synchronous, no torch."""
