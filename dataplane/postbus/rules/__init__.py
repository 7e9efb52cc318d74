"""The language of subscription rules: SQL and correlation filters, and actions."""
