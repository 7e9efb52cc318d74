create materialized view orders_by_sku as
select order.sku, count(*) as orders, sum(order.amount) as amount
from orders
group by order.sku
