"""The runner of pipelines: `postbus-pipeline`."""
