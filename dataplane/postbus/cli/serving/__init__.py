"""Running a bus in this process, for `dev` and `serve`."""
