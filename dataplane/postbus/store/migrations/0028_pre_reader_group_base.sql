-- scope: partition
-- The low mark when a group was placed: what is missing below it was deleted before, and is no loss.
alter table reader_group add column base bigint not null default 0;
