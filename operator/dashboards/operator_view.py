"""The dashboard of the operator."""

from __future__ import annotations

from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.panels import Query, choice, empty_dashboard, lines, number

SOME: Final = 'namespace=~"$namespace"'
PROBLEMS: Final = "invalid|unavailable|refused|failed|unwritten"


def metric(name: str, labels: str = "") -> str:
    """Return the selector of a metric of the operator."""
    return f"postbus_operator_{name}{{{', '.join(filter(None, (SOME, labels)))}}}"


def rate(name: str, by: str, labels: str = "") -> str:
    """Return the rate of a counter, summed."""
    return f"sum by ({by}) (rate({metric(name, labels)}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "") -> str:
    """Return a quantile of a histogram."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{name}_bucket', labels)})"


def operator() -> Dashboard:
    """Return the dashboard of the operator."""
    made = empty_dashboard(
        "postbus-operator",
        "Postbus / Operator",
        "The operator: is it leading, does it keep up, and what does it fail at?",
        choice(
            "namespace",
            "Namespace",
            "label_values(postbus_operator_info, namespace)",
            is_multi=True,
        ),
    )
    _add_state(made)
    _add_looks(made)
    _add_cluster(made)
    return made


def _add_state(made: Dashboard) -> None:
    for panel in (
        number(
            "Operators",
            "none",
            f"count({metric('info')})",
            about="Processes that answer, leader and standby.",
        ),
        number(
            "Leaders",
            "none",
            f"sum({metric('leader')})",
            about="One for each release. None for long: /readyz of the standby has the reason.",
            limits=(1, 1),
            is_low_bad=True,
        ),
        number(
            "Resources",
            "short",
            f"sum({metric('resources')})",
            about="Custom resources of Postbus in the cache of the leader.",
        ),
        number(
            "Due resources",
            "short",
            f"sum({metric('queue_depth')})",
            about="Resources that are due and wait for their reconciliation.",
            limits=(100, 1_000),
        ),
        number(
            "Silence of a watch",
            "s",
            f"max({metric('watch_age_seconds')})",
            about="Time since the most silent watch brought anything; a bookmark comes each "
            "minute.",
            limits=(120, 300),
        ),
        number(
            "Delay of the event loop",
            "s",
            f"max({metric('event_loop_lag_seconds')})",
            about="Large: the process lacks CPU.",
            limits=(0.5, 5),
        ),
    ):
        made.with_panel(panel)


def _add_looks(made: Dashboard) -> None:
    for panel in (
        lines(
            "Reconciliations by result",
            "ops",
            Query(rate("reconciles_total", "result"), "{{result}}"),
            about="The guide of the operator explains the results.",
        ),
        lines(
            "Reconciliations by kind",
            "ops",
            Query(rate("reconciles_total", "kind"), "{{kind}}"),
            about="All results.",
        ),
        lines(
            "Reconciliations with a problem",
            "ops",
            Query(
                rate("reconciles_total", "result", f'result=~"{PROBLEMS}"'),
                "{{result}}",
            ),
            about="The resource has a condition with the reason.",
        ),
        lines(
            "Duration of a reconciliation, 99th percentile",
            "s",
            Query(quantile(0.99, "reconcile_seconds", "kind"), "{{kind}}"),
            about="By kind.",
        ),
        lines(
            "Wait of due resources",
            "s",
            Query(quantile(0.5, "queue_wait_seconds"), "50th percentile"),
            Query(quantile(0.99, "queue_wait_seconds"), "99th percentile"),
            about="Time from due to the begin of the reconciliation.",
        ),
        lines(
            "Queue",
            "short",
            Query(f"sum({metric('queue_depth')})", "due"),
            Query(f"sum({metric('reconciles_running')})", "running"),
            about="Due for long while few run: raise settings.workers.",
        ),
    ):
        made.with_panel(panel)


def _add_cluster(made: Dashboard) -> None:
    for panel in (
        lines(
            "Requests to the API server",
            "reqps",
            Query(rate("api_requests_total", "verb, code"), "{{verb}} {{code}}"),
            about="By verb and status, without watches; code 0: no answer.",
        ),
        lines(
            "Duration of requests, 99th percentile",
            "s",
            Query(quantile(0.99, "api_request_seconds", "verb"), "{{verb}}"),
            about="By verb.",
        ),
        lines(
            "Silence of watches",
            "s",
            Query(f"max by (resource) ({metric('watch_age_seconds')})", "{{resource}}"),
            about="Time since a watch brought an event, a bookmark or a list.",
        ),
        lines(
            "Resources",
            "short",
            Query(f"sum by (kind) ({metric('resources')})", "{{kind}}"),
            about="Custom resources in the cache of the leader.",
        ),
        lines(
            "Transitions of the Lease",
            "none",
            Query(f"max({metric('lease_transitions')})", "transitions"),
            about="Each step is a new leader.",
        ),
        lines(
            "Delay of the event loop",
            "s",
            Query(f"max by (pod) ({metric('event_loop_lag_seconds')})", "{{pod}}"),
            about="By process.",
        ),
    ):
        made.with_panel(panel)
