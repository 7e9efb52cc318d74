"""Definitions at run time: the catalog, its changes and its followers."""
