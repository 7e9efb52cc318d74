"""Limits before and after authentication: connections, failed keys, memory and time per key."""
