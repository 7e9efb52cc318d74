"""Clients of a bus for programs of ours: the command line and the Kubernetes operator."""
