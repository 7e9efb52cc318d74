"""Buses as the operator sees them: their control APIs, feeds and counts."""
