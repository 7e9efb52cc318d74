"""Topics: routing a message to copies in subscriptions."""
