"""The scheduler's decisions: synchronous, without I/O, with time as an argument."""
