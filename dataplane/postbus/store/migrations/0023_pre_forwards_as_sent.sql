-- scope: store
-- What a client sent as the target of a forward, by the name of the field: a URL of its own.
alter table postbus.catalog add column forwards_as_sent jsonb not null default '{}';
