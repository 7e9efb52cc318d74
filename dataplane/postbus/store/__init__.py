"""Durability: the group-commit journal and the SQL behind it."""
