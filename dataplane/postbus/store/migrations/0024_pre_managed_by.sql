-- scope: store
-- The program or person that keeps a definition as it is, in their own words; empty: nobody says.
alter table postbus.catalog add column managed_by text not null default '';
alter table postbus.authorization_rule add column managed_by text not null default '';
