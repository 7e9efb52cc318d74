-- scope: partition
-- Cursors of reader groups. `plan` is that of the group, in its home partition only.
create table reader_group (
    entity_no integer not null,
    sub_queue smallint not null,
    name text not null,
    kind smallint not null,
    epoch bigint not null,
    reader text not null,
    settled bigint not null,
    plan jsonb,
    constraint reader_group_pkey primary key (entity_no, sub_queue, name)
) with (fillfactor = 50);

-- The row key from which on a sub-queue is complete: settled rows below it were deleted.
create table low_mark (
    entity_no integer not null,
    sub_queue smallint not null,
    low bigint not null,
    constraint low_mark_pkey primary key (entity_no, sub_queue)
) with (fillfactor = 50);
