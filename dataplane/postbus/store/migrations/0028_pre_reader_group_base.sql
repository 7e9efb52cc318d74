-- scope: partition
-- The low mark when a group was created or reset: what is missing below it is no loss for it.
alter table reader_group add column base bigint not null default 0;
