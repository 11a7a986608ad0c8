"""The base of every process: clock, configuration, life cycle, RPC, logs and metrics. Knows no service."""
