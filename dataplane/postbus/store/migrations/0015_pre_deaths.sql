-- scope: partition
-- When a message became a dead letter, how often it had been handed out, and who had it then. What
-- died before stays without.
alter table kept
    add column died_ms bigint,
    add column deliveries integer,
    add column link bytea,
    add column client text;
