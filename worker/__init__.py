"""The worker: one device's memory and its only ledger, and the engine that runs a model on it."""
