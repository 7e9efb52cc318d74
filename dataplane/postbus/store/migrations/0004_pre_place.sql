-- scope: store
-- The place of this database among those of its bus; the first start records it.
alter table postbus.store
    add column bus_identity uuid, add column ordinal integer, add column database_count integer;
