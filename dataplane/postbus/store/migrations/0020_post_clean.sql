-- scope: partition
-- Nobody asks whether a partition was released in order.
alter table owner drop column is_clean;
