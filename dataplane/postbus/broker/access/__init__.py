"""Authorization: rules, keys, tokens and host names."""
