"""The process: standby and leader, the queue of looks, health and metrics."""
