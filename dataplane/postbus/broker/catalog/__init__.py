"""Definitions at run time: the catalog, its changes and who follows them."""
