"""What commands read and print: manifests, messages, tables."""
