"""Panels and variables as the dashboards use them, from Grafana's typed builders."""

from __future__ import annotations

from typing import Final, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    VariableOption,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="$datasource")
TAG: Final = "postbus"
COLUMNS: Final = 24
"""Width of Grafana's grid."""

GOOD: Final = "green"
UNUSUAL: Final = "orange"
BAD: Final = "red"


class Query(NamedTuple):
    """An expression of PromQL and the legend of its series; in a table the title of its column."""

    expression: str
    legend: str = ""


class Column(NamedTuple):
    """A column of a table: a query whose labels say the row."""

    title: str
    expression: str
    unit: str = "none"


# --- panels -------------------------------------------------------------------------------------


def lines(title: str, unit: str, *queries: Query, about: str, width: int = 8) -> timeseries.Panel:
    """Return a panel of series over time; `unit` is an identifier of Grafana's."""
    legend = (
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(width)
        .height(8)
        .line_width(1)
        .fill_opacity(10)
        .show_points(common_models.VisibilityMode.NEVER)
        .legend(legend)
        .tooltip(
            common.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
    )
    for number, query in enumerate(queries):
        panel.with_target(
            prometheus.Dataquery()
            .expr(query.expression)
            .legend_format(query.legend)
            .range()
            .ref_id(_letter(number))
        )
    return panel


def number(
    title: str,
    unit: str,
    expression: str,
    *,
    about: str,
    limits: tuple[float, float] | None = None,
    is_low_bad: bool = False,
    width: int = 4,
) -> stat.Panel:
    """Return a panel with one present value.

    `limits`: from where the value is unusual and from where it is bad; with `is_low_bad` it is bad
    below the first and unusual below the second.
    """
    steps = [Threshold(None, GOOD)]
    if limits is not None:
        first, second = limits
        colours = (BAD, UNUSUAL, GOOD) if is_low_bad else (GOOD, UNUSUAL, BAD)
        places = (None, first, second)
        steps = [Threshold(place, each) for place, each in zip(places, colours, strict=True)]
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .unit(unit)
        .span(width)
        .height(4)
        .thresholds(dashboard.ThresholdsConfig().steps(steps))
        .graph_mode(common_models.BigValueGraphMode.NONE)
        .color_mode(common_models.BigValueColorMode.VALUE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(prometheus.Dataquery().expr(expression).instant().ref_id("A"))
    )


def rows(
    title: str, labels: dict[str, str], *columns: Column, about: str, link: str = ""
) -> table.Panel:
    """Return a table with a row for each combination of labels.

    `labels`: label -> title of its column. `link`: address behind the values of the last label.
    """
    order = [*labels, *(f"Value #{_letter(at)}" for at, _ in enumerate(columns))]
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .span(COLUMNS)
        .height(8)
        .with_transformation(DataTransformerConfig(id_val="merge", options={}))
        .with_transformation(
            DataTransformerConfig(
                id_val="organize",
                options={
                    "excludeByName": {"Time": True},
                    "indexByName": {name: at for at, name in enumerate(order)},
                    "renameByName": labels,
                },
            )
        )
    )
    for at, column in enumerate(columns):
        panel.with_target(
            prometheus.Dataquery()
            .expr(column.expression)
            .legend_format(column.title)
            .instant()
            .format(PromQueryFormat.TABLE)
            .ref_id(_letter(at))
        )
        panel.override_by_name(
            f"Value #{_letter(at)}",
            [
                DynamicConfigValue("displayName", column.title),
                DynamicConfigValue("unit", column.unit),
            ],
        )
    if link:
        panel.override_by_name(
            list(labels.values())[-1],
            [DynamicConfigValue("links", [{"title": "Open the bus", "url": link}])],
        )
    return panel


def _letter(at: int) -> str:
    return chr(ord("A") + at)


# --- variables and dashboards -------------------------------------------------------------------


def choice(name: str, label: str, query: str, *, is_multi: bool = False) -> dashboard.QueryVariable:
    """Return a variable whose values come from a query; with `is_multi` it begins with all."""
    variable = (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
    if is_multi:
        everything = VariableOption(selected=True, text=["All"], value=["$__all"])
        # Buses outside of Kubernetes may lack the label.
        variable.multi(True).include_all(True).all_value(".*").current(everything)
    return variable


def empty_dashboard(
    uid: str, title: str, about: str, *variables: dashboard.QueryVariable
) -> dashboard.Dashboard:
    """Return a dashboard without panels that links to the other ones."""
    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags([TAG])
        .editable()
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("Postbus")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .keep_time(True)
        )
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
    )
    for each in variables:
        made.with_variable(each)
    return made
