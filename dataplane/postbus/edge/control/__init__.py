"""The control API: definitions and messages by hand, in JSON."""
