"""One queue: its messages in order, locks, expiry, schedules and duplicate detection."""
