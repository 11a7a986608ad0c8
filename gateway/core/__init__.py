"""The gateway's decisions: pure and synchronous."""
