"""Commands over several partitions: partitioned entities, placement and transactions."""
