-- scope: store
-- Whose the store is: the name of its bus, and what tells its sealing key from another one.
alter table postbus.store add column namespace text, add column sealing_check bytea;
