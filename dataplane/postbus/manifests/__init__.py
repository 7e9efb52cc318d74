"""Reader of YAML manifests."""
