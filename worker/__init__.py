"""The worker: owns one device's memory and runs models on it."""
