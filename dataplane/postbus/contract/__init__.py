"""Models of what can be defined and asked for; anything may import them."""
