"""Namespaces: Secrets, volumes and workloads of a bus, its status and its deletion."""
