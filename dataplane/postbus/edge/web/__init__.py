"""Shared parts of all HTTP servers: requests, limits, authorization."""
