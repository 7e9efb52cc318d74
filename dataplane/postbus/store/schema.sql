-- The tables of a database: identity, migrations, catalog. Complete and current; migrations/ has
-- the steps that led here. The tables of each partition are in partition.sql.

create schema postbus;

-- `sku` and `partition_count` are set by the first start; the count never changes. Neither does the
-- place of this database among those of its bus: `bus_identity` is the identity of the first one,
-- which has the name of the bus and a check value of its sealing key. A closed namespace was empty
-- and accepts no messages.
create table postbus.store (
    is_only boolean primary key default true check (is_only),
    identity uuid not null default gen_random_uuid(),
    created_at timestamptz not null default now(),
    sku text,
    partition_count integer,
    bus_identity uuid,
    ordinal integer,
    database_count integer,
    namespace text,
    sealing_check bytea,
    is_closed boolean not null default false
);

create table postbus.migration (
    number integer primary key,
    name text not null,
    applied_at timestamptz not null default now()
);

-- The version of the catalog; each change of a definition raises it. Some tombstones up to
-- `forgotten_version` were removed.
create table postbus.catalog_version (
    is_only boolean primary key default true check (is_only),
    version bigint not null,
    next_entity_no integer not null,
    forgotten_version bigint not null default 0
);

-- Definitions of entities (decided by partition 0). `is_deleted` keeps the number from reuse,
-- `deleted_reason` is the reason of a deletion. A subscription has the number of its topic and its
-- rules, each with the time it was added. With `restorable_until_ms` a deleted entity keeps its
-- rows in the partitions and can be restored; `deleted_with` is the topic that a subscription was
-- deleted with. New columns come last, as in a migrated table.
create table postbus.catalog (
    entity_no integer primary key,
    name text not null,
    kind text not null,
    definition jsonb not null,
    home_partition integer not null,
    version bigint not null,
    created_ms bigint not null,
    updated_ms bigint not null,
    is_deleted boolean not null default false,
    topic_no integer,
    rules jsonb not null default '[]',
    is_partitioned boolean not null default false,
    deleted_reason text,
    restorable_until_ms bigint,
    deleted_with integer,
    forwards_as_sent jsonb not null default '{}',
    managed_by text not null default ''
);

create unique index catalog_name on postbus.catalog (lower(name)) where not is_deleted;

create index catalog_tombstone on postbus.catalog (version) where is_deleted;

-- Authorization rules made at run time; `entity_no` 0 is the namespace. Keys are sealed (ADR 31).
create table postbus.authorization_rule (
    entity_no integer not null,
    name text not null,
    rights text[] not null,
    primary_sealed bytea not null,
    secondary_sealed bytea not null,
    created_ms bigint not null,
    updated_ms bigint not null,
    managed_by text not null default '',
    constraint authorization_rule_pkey primary key (entity_no, name)
);

-- The highest epoch that a caller of the control API has shown; no row: none has shown one.
create table postbus.caller_epoch (
    is_only boolean primary key default true check (is_only),
    epoch bigint not null
);

-- The definition that the last PUT gave the namespace; without a row the manifest alone counts.
create table postbus.namespace (
    is_only boolean primary key default true check (is_only),
    definition jsonb not null
);

-- Changes by hand: written before the change, completed after it. Without an `outcome` the change
-- is in progress, or its result is unknown. Equal calls of one caller within a minute are one row.
create table postbus.audit (
    audit_no bigint generated always as identity primary key,
    begun_ms bigint not null,
    ended_ms bigint,
    calls integer not null default 1,
    caller text not null,
    address text not null,
    door text not null,
    verb text not null,
    entity text not null,
    detail jsonb not null,
    outcome text
);

-- Incarnations of brokers. `beat` grows each second while the process runs; `ended_by` is the
-- incarnation that took over from it. The columns between identify the process; `schema_version` is
-- the newest schema that it knows, `persisted_ms` the highest entity time in its commits,
-- `asked_by` the incarnation that asked it to end.
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
    ended_by text,
    asked_by text
) with (fillfactor = 50);
