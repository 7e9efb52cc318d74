"""Models of definitions, requests and responses; what connection strings and tokens look like.

Every package may import them.
"""
