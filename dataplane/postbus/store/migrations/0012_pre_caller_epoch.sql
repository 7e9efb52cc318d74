-- scope: store
-- The highest epoch that a caller of the control API has shown; no row: none has shown one.
create table postbus.caller_epoch (
    is_only boolean primary key default true check (is_only),
    epoch bigint not null
);
