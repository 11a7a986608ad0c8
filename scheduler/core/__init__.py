"""Decisions of the scheduler: pure, synchronous, time as an argument."""
