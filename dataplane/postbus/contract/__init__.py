"""Models of definitions, requests and responses; every package may import them."""
