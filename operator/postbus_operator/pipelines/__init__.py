"""Pipelines: reader group, key, and the workload that runs the document."""
