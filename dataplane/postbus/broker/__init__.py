"""Ownership of partitions: order, timers, routing, catalog, authorisation."""
