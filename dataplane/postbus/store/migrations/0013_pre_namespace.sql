-- scope: store
-- What the namespace was told to be while it ran; no row: nothing, its manifest alone says it.
create table postbus.namespace (
    is_only boolean primary key default true check (is_only),
    definition jsonb not null
);
