-- scope: store
-- What the first start chose; a later one that contradicts it is refused.
alter table postbus.store add column sku text, add column partition_count integer;
