-- scope: partition
-- Rows that stay in `message` for the retention of their entity, but are not live (D5).
create table settled (
    row_key bigint not null,
    entity_no integer not null,
    how smallint not null,
    settled_ms bigint not null,
    constraint settled_pkey primary key (row_key)
) with (autovacuum_enabled = off, vacuum_truncate = off);

create index settled_time on settled (entity_no, settled_ms);
