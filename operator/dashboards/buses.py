"""The dashboards of all buses and of one bus."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from dashboards.panels import Column, Query, choice, empty_dashboard, lines, number, rows

SOME: Final = 'namespace=~"$namespace"'
ONE: Final = 'namespace="$namespace", bus="$bus"'
ENTITY: Final = f'{ONE}, entity=~"$entity"'
BUS: Final = "{{namespace}}/{{bus}}"
GROUP: Final = "{{entity}} {{sub_queue}} {{group}}"
BUS_UID: Final = "postbus-bus"
SENT: Final = 'kind!="subscription"'
"""The copies of a subscription are no messages that a client sent."""

RECEIVED: Final = 'kind!="topic"'
DEAD: Final = 'state=~"dead_letter|transfer_dead_letter"'


def rate(metric: str, labels: str, by: str, *, top: int = 0) -> str:
    """Return the rate of a counter, summed; `top`: only so many, the largest above zero."""
    summed = f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"
    return f"topk({top}, {summed} > 0)" if top else summed


def quantile(q: float, labels: str, by: str) -> str:
    """Return a quantile of the duration of commits."""
    buckets = f"rate(postbus_commit_seconds_bucket{{{labels}}}[$__rate_interval])"
    return f"histogram_quantile({q}, sum by ({by}, le) ({buckets}))"


# --- all buses ----------------------------------------------------------------------------------


def buses() -> Dashboard:
    """Return the dashboard of all buses."""
    made = empty_dashboard(
        "postbus-buses",
        "Postbus / Buses",
        "All buses of a cluster: which of them needs attention?",
        choice(
            "namespace",
            "Namespace",
            "label_values(postbus_build_info, namespace)",
            is_multi=True,
        ),
    )
    _add_state_of_buses(made)
    link = f"/d/{BUS_UID}?var-namespace=${{__data.fields.Namespace}}&var-bus=${{__value.text}}"
    by = "by (namespace, bus)"
    made.with_panel(
        rows(
            "Buses",
            {"namespace": "Namespace", "bus": "Bus"},
            Column("Brokers", f"count {by} (postbus_build_info{{{SOME}}})"),
            Column("Connections", f"sum {by} (postbus_connections{{{SOME}}})"),
            Column(
                "Active",
                f'sum {by} (postbus_messages{{{SOME}, {RECEIVED}, state="active"}})',
                "short",
            ),
            Column("Dead letters", f"sum {by} (postbus_messages{{{SOME}, {DEAD}}})", "short"),
            Column(
                "Oldest message", f"max {by} (postbus_oldest_message_age_seconds{{{SOME}}})", "s"
            ),
            Column("Size", f"sum {by} (postbus_entity_size_bytes{{{SOME}}})", "bytes"),
            about="Present state; a bus opens its own dashboard. No age: no message waits.",
            link=link,
        )
    )
    _add_load_of_buses(made)
    return made


def _add_state_of_buses(made: Dashboard) -> None:
    for panel in (
        number(
            "Buses",
            "none",
            f"count(count by (namespace, bus) (postbus_build_info{{{SOME}}}))",
            about="Buses with at least one broker that answers.",
        ),
        number(
            "Brokers down",
            "none",
            f'count(up{{job="postbus", {SOME}}} == 0) or vector(0)',
            about="Brokers that Prometheus knows and that do not answer: PostbusDown.",
            limits=(1, 2),
        ),
        number(
            "Databases unavailable",
            "none",
            f"sum(postbus_store_up{{{SOME}}} == bool 0)",
            about="PostbusStoreAway; /readyz of the broker has the reason.",
            limits=(1, 2),
        ),
        number(
            "Partitions loading",
            "none",
            f'sum(postbus_partition_status_info{{{SOME}, status="loading"}}) or vector(0)',
            about="Above zero for minutes: PostbusPartitionNotLoaded.",
            limits=(1, 2),
        ),
        number(
            "Full partitions",
            "none",
            f"sum(postbus_partition_full_info{{{SOME}}})",
            about="Partitions that refuse sends because their store is full: PostbusStoreFull.",
            limits=(1, 2),
        ),
        number(
            "Dead letters",
            "short",
            f"sum(postbus_messages{{{SOME}, {DEAD}}})",
            about="Messages in dead-letter queues and transfer dead-letter queues.",
            limits=(1, 1_000),
        ),
    ):
        made.with_panel(panel)


def _add_load_of_buses(made: Dashboard) -> None:
    by = "namespace, bus"
    for panel in (
        lines(
            "Sent",
            "mps",
            Query(rate("postbus_messages_accepted_total", f"{SOME}, {SENT}", by), BUS),
            about="Messages accepted from clients and forwarding.",
        ),
        lines(
            "Completed",
            "mps",
            Query(rate("postbus_messages_completed_total", f"{SOME}, {RECEIVED}", by), BUS),
            about="Messages completed by receivers.",
        ),
        lines(
            "Dead-lettered",
            "mps",
            Query(rate("postbus_messages_dead_lettered_total", SOME, by), BUS),
            about="Messages moved to dead-letter queues.",
        ),
        lines(
            "Active messages",
            "short",
            Query(
                f'sum by ({by}) (postbus_messages{{{SOME}, {RECEIVED}, state="active"}})',
                BUS,
            ),
            about="Messages that wait, locked and deferred ones included.",
        ),
        lines(
            "Oldest message",
            "s",
            Query(f"max by ({by}) (postbus_oldest_message_age_seconds{{{SOME}}})", BUS),
            about="Longest wait of a message that is next in its entity.",
        ),
        lines(
            "Commit duration, 99th percentile",
            "s",
            Query(quantile(0.99, SOME, by), BUS),
            about="A client is answered after the commit. Above half a second: PostbusCommitsSlow.",
        ),
        lines(
            "Connections",
            "short",
            Query(f"sum by ({by}) (postbus_connections{{{SOME}}})", BUS),
            about="Open connections over AMQP and HTTP.",
        ),
        lines(
            "Refused keys",
            "cps",
            Query(rate("postbus_authentication_failures_total", SOME, by), BUS),
            about="Tokens and passwords that were refused.",
        ),
        lines(
            "Requests above a share",
            "cps",
            Query(rate("postbus_share_refusals_total", SOME, by), BUS),
            about="Requests refused because a key had used up its share: PostbusShareUsedUp.",
        ),
    ):
        made.with_panel(panel)


# --- one bus ------------------------------------------------------------------------------------


def bus() -> Dashboard:
    """Return the dashboard of one bus."""
    made = empty_dashboard(
        BUS_UID,
        "Postbus / Bus",
        "One bus: its entities, its store, its clients and its processes.",
        choice("namespace", "Namespace", "label_values(postbus_build_info, namespace)"),
        choice("bus", "Bus", 'label_values(postbus_build_info{namespace="$namespace"}, bus)'),
        choice(
            "entity",
            "Entity",
            f"label_values(postbus_messages{{{ONE}}}, entity)",
            is_multi=True,
        ),
    )
    _add_state_of_bus(made)
    made.with_row(Row("Entities"))
    _add_flow(made)
    _add_backlog(made)
    made.with_row(Row("Reader groups"))
    _add_groups(made)
    made.with_row(Row("Store"))
    _add_store(made)
    made.with_row(Row("Clients"))
    _add_clients(made)
    made.with_row(Row("Processes"))
    _add_processes(made)
    return made


def _add_state_of_bus(made: Dashboard) -> None:
    for panel in (
        number(
            "Brokers",
            "none",
            f"count(postbus_build_info{{{ONE}}})",
            about="Brokers that answer.",
        ),
        number(
            "Databases unavailable",
            "none",
            f"sum(postbus_store_up{{{ONE}}} == bool 0)",
            about="PostbusStoreAway; /readyz of the broker has the reason.",
            limits=(1, 2),
        ),
        number(
            "Active messages",
            "short",
            f'sum(postbus_messages{{{ENTITY}, {RECEIVED}, state="active"}})',
            about="Messages that wait, locked and deferred ones included.",
        ),
        number(
            "Dead letters",
            "short",
            f"sum(postbus_messages{{{ENTITY}, {DEAD}}})",
            about="Messages in dead-letter queues and transfer dead-letter queues.",
            limits=(1, 1_000),
        ),
        number(
            "Free on the data volume",
            "percentunit",
            f"min(postbus_data_volume_free_bytes{{{ONE}}} / postbus_data_volume_bytes{{{ONE}}})",
            about="Below a tenth: PostbusVolumeFilling.",
            limits=(0.1, 0.2),
            is_low_bad=True,
        ),
        number(
            "End of the certificate",
            "s",
            f"min(postbus_certificate_expiry_timestamp_seconds{{{ONE}}}) - time()",
            about="Time until the first TLS certificate ends. Below 14 days: "
            "PostbusCertificateExpires.",
            limits=(7 * 86_400, 14 * 86_400),
            is_low_bad=True,
        ),
    ):
        made.with_panel(panel)


def _add_flow(made: Dashboard) -> None:
    for panel in (
        lines(
            "Sent",
            "mps",
            Query(
                rate("postbus_messages_accepted_total", f"{ENTITY}, {SENT}", "entity", top=10),
                "{{entity}}",
            ),
            about="Messages accepted by queue and topic; the ten busiest.",
        ),
        lines(
            "Completed",
            "mps",
            Query(
                rate("postbus_messages_completed_total", f"{ENTITY}, {RECEIVED}", "entity", top=10),
                "{{entity}}",
            ),
            about="Messages completed by queue and subscription; the ten busiest.",
        ),
        lines(
            "Flow",
            "mps",
            Query(rate("postbus_messages_accepted_total", f"{ENTITY}, {SENT}", "bus"), "sent"),
            Query(rate("postbus_messages_delivered_total", ENTITY, "bus"), "delivered"),
            Query(rate("postbus_messages_completed_total", ENTITY, "bus"), "completed"),
            Query(rate("postbus_messages_expired_total", ENTITY, "bus"), "expired"),
            about="More deliveries than completions: receivers abandon messages, or lose locks.",
        ),
    ):
        made.with_panel(panel)


def _add_backlog(made: Dashboard) -> None:
    for panel in (
        lines(
            "Messages by state",
            "short",
            Query(
                f"sum by (state) (postbus_messages{{{ENTITY}, {RECEIVED}}})",
                "{{state}}",
            ),
            about="Active messages include locked and deferred ones.",
        ),
        lines(
            "Active messages",
            "short",
            Query(
                f"topk(10, sum by (entity) "
                f'(postbus_messages{{{ENTITY}, {RECEIVED}, state="active"}}) > 0)',
                "{{entity}}",
            ),
            about="Backlog by queue and subscription; the ten largest.",
        ),
        lines(
            "Oldest message",
            "s",
            Query(
                f"topk(10, max by (entity) (postbus_oldest_message_age_seconds{{{ENTITY}}}))",
                "{{entity}}",
            ),
            about="Wait of the next message; the ten longest. Above 15 minutes: PostbusBacklogOld.",
        ),
        lines(
            "Dead letters",
            "short",
            Query(
                f"topk(10, sum by (entity) (postbus_messages{{{ENTITY}, {DEAD}}}) > 0)",
                "{{entity}}",
            ),
            about="Messages in dead-letter queues; the ten longest.",
        ),
        lines(
            "Dead-lettered by reason",
            "mps",
            Query(
                rate("postbus_messages_dead_lettered_total", ENTITY, "reason", top=10),
                "{{reason}}",
            ),
            about="Reasons of receivers and of the broker; the ten most frequent.",
        ),
        lines(
            "Size",
            "bytes",
            Query(
                f"topk(10, sum by (entity) (postbus_entity_size_bytes{{{ENTITY}}}) > 0)",
                "{{entity}}",
            ),
            about="Bytes that count against the quota; the ten largest.",
        ),
    ):
        made.with_panel(panel)


def _add_groups(made: Dashboard) -> None:
    by = "entity, sub_queue, group"
    for panel in (
        lines(
            "Lag of reader groups",
            "s",
            Query(
                f"topk(10, max by ({by}) (postbus_reader_group_lag_seconds{{{ENTITY}}}))",
                GROUP,
            ),
            about="Age of the oldest message that a group has not processed; the ten longest. "
            "Above an hour: PostbusGroupLags.",
        ),
        lines(
            "Messages before reader groups",
            "short",
            Query(
                f"topk(10, max by ({by}) (postbus_reader_group_lag_messages{{{ENTITY}}}) > 0)",
                GROUP,
            ),
            about="Messages that a group has not processed, an estimate; the ten longest.",
        ),
        lines(
            "Kept for reader groups",
            "bytes",
            Query(
                f"topk(10, max by ({by}) (postbus_reader_group_kept_bytes{{{ENTITY}}}) > 0)",
                GROUP,
            ),
            about="Bytes of settled messages that stay for a group, an estimate; the ten largest. "
            "Above 10 GiB: PostbusGroupKeepsMuch. Above a limit: PostbusGroupOverLimit.",
        ),
    ):
        made.with_panel(panel)


def _add_store(made: Dashboard) -> None:
    for panel in (
        lines(
            "Commit duration",
            "s",
            Query(quantile(0.5, ONE, "bus"), "50th percentile"),
            Query(quantile(0.99, ONE, "bus"), "99th percentile"),
            Query(f"max(postbus_store_round_trip_seconds{{{ONE}}})", "heartbeat"),
            about="A client is answered after the commit. The heartbeat, a commit of one row, is "
            "the minimum cost of disk and network.",
        ),
        lines(
            "Rows",
            "rowsps",
            Query(rate("postbus_store_written_rows_total", ONE, "bus"), "written"),
            Query(rate("postbus_store_read_rows_total", ONE, "bus"), "read"),
            about="Rows written, and messages read because they were not in memory.",
        ),
        lines(
            "Waiting for a commit",
            "bytes",
            Query(
                f"sum by (partition) (postbus_journal_queued_bytes{{{ONE}}})",
                "partition {{partition}}",
            ),
            about="Above 16 MiB: PostbusJournalFilling. Above 32 MiB sends are refused as busy.",
        ),
        lines(
            "Partitions",
            "none",
            Query(f"sum by (status) (postbus_partition_status_info{{{ONE}}})", "{{status}}"),
            Query(f"sum(postbus_partition_full_info{{{ONE}}})", "full"),
            about="Partitions in use by status, and those whose store is full.",
        ),
        lines(
            "Reloads and takeovers",
            "none",
            Query(
                f"sum(increase(postbus_partition_reloads_total{{{ONE}}}[$__rate_interval]))",
                "reloads",
            ),
            Query(
                f"sum(increase(postbus_partition_fences_total{{{ONE}}}[$__rate_interval]))",
                "takeovers by another broker",
            ),
            about="A reload after a failed commit loses the locks of its partition.",
        ),
        lines(
            "Databases",
            "none",
            Query(f"min by (store) (postbus_store_up{{{ONE}}})", "store {{store}}"),
            about="1 while a database works for the bus.",
        ),
    ):
        made.with_panel(panel)


def _add_clients(made: Dashboard) -> None:
    for panel in (
        lines(
            "Connections",
            "short",
            Query(f"sum by (protocol) (postbus_connections{{{ONE}}})", "{{protocol}}"),
            Query(f"sum(postbus_connections_without_key{{{ONE}}})", "not authenticated"),
            about="Open connections, with TLS or without.",
        ),
        lines(
            "New connections",
            "cps",
            Query(rate("postbus_connections_accepted_total", ONE, "protocol"), "{{protocol}}"),
            Query(rate("postbus_connections_refused_total", ONE, "bus"), "refused"),
            Query(rate("postbus_connections_failed_total", ONE, "bus"), "failed"),
            Query(rate("postbus_connections_cut_total", ONE, "bus"), "cut"),
            about="Refused: above the limit. Failed: in the TLS handshake or without a protocol. "
            "Cut: not authenticated, closed in favour of others.",
        ),
        lines(
            "HTTP requests",
            "reqps",
            Query(
                rate("postbus_http_requests_total", ONE, "api, status"),
                "{{api}} {{status}}",
            ),
            about="By API and status.",
        ),
        lines(
            "Refused keys",
            "cps",
            Query(rate("postbus_authentication_failures_total", ONE, "bus"), "refused"),
            about="Above one a second: PostbusAuthenticationFailures.",
            width=12,
        ),
        lines(
            "Requests above a share",
            "cps",
            Query(rate("postbus_share_refusals_total", ONE, "of"), "{{of}}"),
            about="Refused because a key had used up its share: PostbusShareUsedUp.",
            width=12,
        ),
    ):
        made.with_panel(panel)


def _add_processes(made: Dashboard) -> None:
    for panel in (
        lines(
            "CPU",
            "none",
            Query(
                f'rate(process_cpu_seconds_total{{job="postbus", {ONE}}}[$__rate_interval])',
                "{{pod}}",
            ),
            about="Cores in use by broker. One broker uses one core at most for messages.",
        ),
        lines(
            "Resident memory",
            "bytes",
            Query(f'process_resident_memory_bytes{{job="postbus", {ONE}}}', "{{pod}}"),
            about="By broker.",
        ),
        lines(
            "Messages in memory",
            "bytes",
            Query(f"sum(postbus_window_bytes{{{ONE}}})", "used"),
            Query(f"sum(postbus_window_limit_bytes{{{ONE}}})", "limit"),
            about="Memory of messages that are ready to be delivered, and POSTBUS_WINDOW_BYTES.",
        ),
    ):
        made.with_panel(panel)
