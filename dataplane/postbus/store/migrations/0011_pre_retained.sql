-- scope: store
-- Deleted entities that can be restored, and how far back tombstones are known.
alter table postbus.catalog
    add column restorable_until_ms bigint,
    add column deleted_with integer;

create index catalog_tombstone on postbus.catalog (version) where is_deleted;

alter table postbus.catalog_version add column forgotten_version bigint not null default 0;
