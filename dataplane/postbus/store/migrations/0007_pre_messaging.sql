-- scope: partition
-- Topics, sessions, duplicate detection, outbox and shared bodies.
alter table entity
    add column kind text not null default 'queue',
    add column topic_no integer,
    add column rules jsonb not null default '[]',
    add column is_partitioned boolean not null default false,
    add column last_used_ms bigint not null default 0;

create table shared (
    body_id bigint not null,
    row_keys bytea not null,
    constraint shared_pkey primary key (body_id)
);

create table session (
    entity_no integer not null,
    session_id bytea not null,
    state bytea not null,
    updated_ms bigint not null,
    constraint session_pkey primary key (entity_no, session_id)
);

create table seen (
    entity_no integer not null,
    first_ms bigint not null,
    last_ms bigint not null,
    digests bytea not null
) with (toast_tuple_target = 8160);

create index seen_time on seen (entity_no, first_ms);

create table outbound (
    row_key bigint not null,
    source_no integer not null,
    target text not null,
    sequence bigint not null,
    is_dead_letter boolean not null,
    constraint outbound_pkey primary key (row_key)
);

create table inbound (
    entity_no integer not null,
    source_partition integer not null,
    last_number bigint not null,
    constraint inbound_pkey primary key (entity_no, source_partition)
) with (fillfactor = 50);

alter table seen alter column digests set storage external;

do $$
begin
    if exists (
        select from pg_settings
        where name = 'default_toast_compression' and 'lz4' = any (enumvals)
    ) then
        alter table session alter column state set compression lz4;
    else
        alter table session alter column state set storage external;
    end if;
end
$$;
