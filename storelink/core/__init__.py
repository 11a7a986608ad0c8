"""Decisions that every engine beside a store takes: pure, synchronous."""
