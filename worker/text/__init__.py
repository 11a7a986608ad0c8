"""Tokens to text and back."""
