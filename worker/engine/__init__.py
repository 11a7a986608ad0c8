"""The engine: drives a core on one thread and runs its steps."""
