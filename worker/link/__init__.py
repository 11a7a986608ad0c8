"""The link to the store: loads, saves, and the threads that copy pieces."""
