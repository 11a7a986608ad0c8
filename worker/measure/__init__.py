"""Measures how long steps and loads take on this machine."""
