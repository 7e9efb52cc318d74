-- scope: partition
-- Which life of which broker owns the partition.
alter table owner add column incarnation uuid;
