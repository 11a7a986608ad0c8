"""What steps and loads take on this machine."""
