-- scope: store
-- Brokers and their beats. `schema_version` is the newest that a broker knows.
create table postbus.broker (
    incarnation uuid primary key,
    broker_name text not null,
    host text not null,
    pid integer not null,
    boot_id text not null,
    pid_namespace text not null,
    started_ticks bigint not null,
    data_lock text not null,
    schema_version integer not null,
    started_at timestamptz not null default now(),
    beat bigint not null default 0,
    persisted_ms bigint not null default 0,
    ended_by text
) with (fillfactor = 50);
