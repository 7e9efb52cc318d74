"""Assembles one bus from its stores, broker and listeners."""
