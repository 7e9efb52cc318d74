"""The process around a bus: settings, logs, metrics, embedded Postgres, data directory."""
