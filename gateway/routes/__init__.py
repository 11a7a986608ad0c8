"""The HTTP routes: each file turns requests into calls of the gateway's parts, and results into bodies."""
