-- scope: partition
-- Steps after `schema_version` that the tables have taken: `post` ones among them may wait.
alter table owner add column taken_steps integer[] not null default '{}';
