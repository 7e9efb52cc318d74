"""What is generated from the table of kinds and the settings: reference, charts, manifests."""
