-- scope: store
-- Authorization rules made at run time.
create table postbus.authorization_rule (
    entity_no integer not null,
    name text not null,
    rights text[] not null,
    primary_sealed bytea not null,
    secondary_sealed bytea not null,
    created_ms bigint not null,
    updated_ms bigint not null,
    constraint authorization_rule_pkey primary key (entity_no, name)
);
