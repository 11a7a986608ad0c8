"""The way to the store: loads, saves, and the thread that copies pieces."""
