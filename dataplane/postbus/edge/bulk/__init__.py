"""The bulk API: reader groups, and ranges of rows as Arrow streams."""
