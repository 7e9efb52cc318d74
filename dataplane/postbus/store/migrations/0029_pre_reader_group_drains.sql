-- scope: partition
-- The end of what a group reads now, and the time at which it was created or reset.
alter table reader_group
    add column planned bigint not null default 0,
    add column placed_ms bigint not null default 0;
