"""The launcher's decisions: a stack's processes, their restarts, and the order in which they stop."""
