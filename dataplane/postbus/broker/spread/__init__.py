"""What spans partitions: partitioned entities, placement and transactions."""
