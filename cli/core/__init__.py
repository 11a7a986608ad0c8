"""What the launcher decides: which processes a stack has, when one is restarted, in which order they stop."""
