"""Input and output formats of commands: manifests, messages, tables."""
