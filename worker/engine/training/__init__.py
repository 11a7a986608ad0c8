"""Fine-tuning beside serving, on one device (HARLI)."""
