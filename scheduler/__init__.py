"""The scheduler: decides which device runs which turn. Knows load, sessions and hints; moves no KV."""
