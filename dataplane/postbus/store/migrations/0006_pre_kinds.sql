-- scope: store
-- Topics, subscriptions with their rules, partitioned entities, and why something is gone.
alter table postbus.catalog
    add column topic_no integer,
    add column rules jsonb not null default '[]',
    add column is_partitioned boolean not null default false,
    add column deleted_reason text;
