"""The control API: definitions and message operations, in JSON."""
