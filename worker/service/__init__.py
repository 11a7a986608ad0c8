"""The worker's interfaces to gateways and schedulers: token stream, reports, metrics."""
