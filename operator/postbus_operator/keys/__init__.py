"""Authorization rules and the Secrets of their keys."""
