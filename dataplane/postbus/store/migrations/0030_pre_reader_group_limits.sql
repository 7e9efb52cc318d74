-- scope: partition
-- Bounds of what a reader group keeps; null: none.
alter table reader_group add column limits jsonb;
