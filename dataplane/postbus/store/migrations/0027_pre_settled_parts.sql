-- scope: partition
-- Parts of a block in which everything is settled, one bit each: the load skips them (ADR 44).
alter table block add column settled_parts bigint not null default 0;

-- Which rows carry a body that lies in a part. A claim has less time than a large index takes.
set local statement_timeout = '60s';
create index embodied_body on embodied (body_id);
