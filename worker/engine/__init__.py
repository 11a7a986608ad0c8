"""The engine: who runs, and the step, on one thread."""
