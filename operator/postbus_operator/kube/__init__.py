"""The API server: requests, what the watches have shown, and whom a change concerns."""
