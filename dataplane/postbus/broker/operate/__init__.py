"""Operating a bus: message operations, readiness, traces, the controls of a development bus."""
