"""How an Upbeat process lives: clock, configuration, life cycle, RPC, logs and metrics. Knows no service."""
