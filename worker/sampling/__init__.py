"""The next token, and the text and calls that answers become."""
