"""Operating a bus: messages by hand, readiness, traces, the controls of a development bus."""
