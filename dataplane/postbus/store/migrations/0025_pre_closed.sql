-- scope: store
-- Whether the namespace is closed: it was empty and accepts no messages.
alter table postbus.store add column is_closed boolean not null default false;
