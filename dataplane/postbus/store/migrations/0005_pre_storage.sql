-- scope: partition
-- No pglz where there is no lz4: it costs more CPU than all the rest of an insert.
do $$
begin
    if not exists (
        select from pg_settings
        where name = 'default_toast_compression' and 'lz4' = any (enumvals)
    ) then
        alter table message
            alter column envelope set storage external,
            alter column application_properties set storage external,
            alter column body set storage external;
        alter table body alter column data set storage external;
    end if;
end
$$;
