"""The doors: translation between wire protocols and entity commands."""
