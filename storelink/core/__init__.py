"""Decisions of every engine beside a store: pure, synchronous."""
