"""The scheduler: which node answers which turn. Knows load, sessions and hints; moves no bytes."""
