"""Manifests in YAML, read into definitions."""
