-- scope: partition
-- Messages that were sent again by hand are no duplicates of themselves where they arrive.
alter table outbound add column is_resent boolean not null default false;
