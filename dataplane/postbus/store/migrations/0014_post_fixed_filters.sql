-- scope: store
-- True and false filters are told from SQL that says the same; so far each such rule was one.
update postbus.catalog
set rules = (
    select jsonb_agg(
        case
            when each #>> '{rule,sqlFilter,sqlExpression}' = '1=1'
                and coalesce(each #> '{rule,sqlFilter,parameters}', '{}') = '{}'
            then jsonb_set(each, '{rule,filterType}', '"TrueFilter"')
            when each #>> '{rule,sqlFilter,sqlExpression}' = '1=0'
                and coalesce(each #> '{rule,sqlFilter,parameters}', '{}') = '{}'
            then jsonb_set(each, '{rule,filterType}', '"FalseFilter"')
            else each
        end
        order by place
    )
    from jsonb_array_elements(rules) with ordinality as rule_at (each, place)
)
where rules::text like '%"1=1"%' or rules::text like '%"1=0"%';
