-- scope: store
-- Who asked a broker to end: another process of its name that takes over.
alter table postbus.broker add column asked_by text;
