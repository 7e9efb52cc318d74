"""The edge: translation between wire protocols and entity commands."""
