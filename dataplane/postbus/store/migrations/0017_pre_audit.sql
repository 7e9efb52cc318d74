-- scope: store
-- Who changed what by hand.
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
