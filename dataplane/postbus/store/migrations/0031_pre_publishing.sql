-- scope: partition
-- What writers of the bulk API staged and published, in the home partition of the entity.
create table writer (
    entity_no integer not null,
    name text not null,
    batch bigint not null,
    message_count bigint not null,
    rate integer,
    slot smallint,
    next_number bigint not null,
    constraint writer_pkey primary key (entity_no, name)
) with (fillfactor = 50);

create table stage (
    stage_no bigint not null,
    entity_no integer not null,
    writer text not null,
    staged_ms bigint not null,
    message_count integer not null,
    size_bytes bigint not null,
    first_number bigint,
    constraint stage_pkey primary key (stage_no)
) with (fillfactor = 50);

create index stage_writer on stage (entity_no, writer);

create table stage_part (
    stage_no bigint not null,
    part integer not null,
    data bytea not null,
    constraint stage_part_pkey primary key (stage_no, part)
) with (toast_tuple_target = 8160);

alter table stage_part alter column data set storage external;
