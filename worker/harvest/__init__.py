"""LoRA training in units of milliseconds, which pauses and moving weights change in no bit (HARLI)."""
