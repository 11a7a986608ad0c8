"""What gateway and scheduler see of a worker."""
