"""The deterministic state machine of one partition: commands in, outcomes out."""
