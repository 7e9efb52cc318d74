"""Medians, spread and ratios of the results; the table and the JSON file made of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from measuring import Result, reason_of
from rows import Demand, Metric, Row

PEER_NAMES = {"rabbitmq": "RabbitMQ 3", "rabbitmq4": "RabbitMQ 4", "artemis": "Artemis"}
PEERS = tuple(PEER_NAMES)
_UNAUTHENTICATED_LOGGED_FROM = (
    0.10  # share of the machine; above it a result deserves a second look
)


@dataclass(slots=True)
class Results:
    """All results of a run: by row, by broker, one for each round."""

    about: dict[str, Any]
    rows: dict[str, dict[str, list[Result]]] = field(default_factory=dict)

    def add(self, row: Row, broker: str, result: Result) -> None:
        """Keep one result."""
        self.rows.setdefault(row.key, {}).setdefault(broker, []).append(result)

    def values(self, row: Row, broker: str, metric: str) -> list[float]:
        """Return a metric of all rounds that came to their end."""
        results = self.rows.get(row.key, {}).get(broker, [])
        return [r[metric] for r in results if metric in r and r.get("is_complete", True)]

    def median(self, row: Row, broker: str, metric: str) -> float | None:
        """Return the median; None where nothing was measured."""
        values = self.values(row, broker, metric)
        return statistics.median(values) if values else None

    def ratio(self, row: Row, peer: str, metric: str) -> float | None:
        """Return Postbus' median through the peer's, of the same run."""
        own, other = self.median(row, "postbus", metric), self.median(row, peer, metric)
        return own / other if own is not None and other else None


def as_json(results: Results, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the machine, medians, ratios and each single result."""
    summary: dict[str, Any] = {}
    for row in rows:
        summary[row.key] = {
            metric.key: {
                "unit": metric.unit,
                "median": {b: results.median(row, b, metric.key) for b in _brokers(results)},
                "spread": {b: _spread(results, row, b, metric.key) for b in _brokers(results)},
                "ratio": {p: results.ratio(row, p, metric.key) for p in PEERS},
            }
            for metric in row.metrics
        }
    return {"about": results.about, "summary": summary, "results": results.rows}


def show(results: Results, rows: Sequence[Row], console: Console) -> None:
    """Print the table, and below it failed and disturbed runs."""
    brokers = _brokers(results)
    scale = results.about["scale"]
    scaled = "" if scale == 1 else f"; all counts times {scale:g}"
    table = Table(title=f"Postbus and its peers: median (lowest to highest){scaled}")
    table.add_column("row")
    table.add_column("number")
    for broker in brokers:
        table.add_column(results.about["titles"][broker], justify="right")
    compared = [peer for peer in PEERS if peer in brokers and "postbus" in brokers]
    for peer in compared:
        table.add_column(f"÷ {PEER_NAMES[peer]}", justify="right")
    table.add_column("must, goal")
    for row in rows:
        for index, metric in enumerate(row.metrics):
            cells = [_cell(results, row, broker, metric) for broker in brokers]
            ratios = [results.ratio(row, peer, metric.key) for peer in compared]
            table.add_row(
                row.title if index == 0 else "",
                f"{metric.label}, {metric.unit}",
                *cells,
                *(f"{ratio:.2f}" if ratio is not None else "" for ratio in ratios),
                _verdicts(results, row, metric),
                end_section=index == len(row.metrics) - 1,
            )
    console.print(table)
    for note in _notes(results):
        console.print(note, style="yellow", markup=False)
    for key, value in results.about.items():
        if key != "titles":
            console.print(f"{key}: {value}", style="dim", markup=False)


def _brokers(results: Results) -> list[str]:
    return list(results.about["titles"])


def _spread(results: Results, row: Row, broker: str, metric: str) -> list[float] | None:
    values = results.values(row, broker, metric)
    return [min(values), max(values)] if values else None


def _cell(results: Results, row: Row, broker: str, metric: Metric) -> str:
    values = results.values(row, broker, metric.key)
    if not values:
        return "–"
    text = _number(statistics.median(values))
    if len(values) > 1:
        text += f" ({_number(min(values))}–{_number(max(values))})"
    return text


def _number(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.1f} k"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _verdicts(results: Results, row: Row, metric: Metric) -> str:
    return "\n".join(
        _verdict(results, row, metric, demand)
        for demand in row.demands
        if demand.metric == metric.key
    )


def _verdict(results: Results, row: Row, metric: Metric, demand: Demand) -> str:
    if demand.peer is None:
        value, name = results.median(row, "postbus", metric.key), ""
    else:
        value, name = results.ratio(row, demand.peer, metric.key), f"÷ {PEER_NAMES[demand.peer]} "
    sign = "≥" if metric.is_better_high else "≤"
    text = f"{name}{sign} {demand.must:g}, {demand.goal:g}"
    if value is None:
        return text
    reached = [
        value >= limit if metric.is_better_high else value <= limit
        for limit in (demand.must, demand.goal)
    ]
    if reached[1]:
        return f"[green]{text} goal[/]"
    return f"[green]{text} must[/]" if reached[0] else f"[red]{text} missed[/]"


def _notes(results: Results) -> list[str]:
    notes = []
    for key, brokers in results.rows.items():
        for broker, rounds in brokers.items():
            for number, result in enumerate(rounds, 1):
                where = f"{key}, {broker}, round {number}"
                if not result.get("is_complete", True):
                    notes.append(f"{where}: not finished: {result.get('error') or _why(result)}")
                others = result.get("foreign_share", 0) + result.get("stolen_share", 0)
                if others > _UNAUTHENTICATED_LOGGED_FROM:
                    notes.append(f"{where}: others used {others:.0%} of the machine")
                notes += [
                    f"{where}: {name.removeprefix('problem_')}: {text}"
                    for name, text in result.items()
                    if name.startswith("problem_")
                ]
    return notes


def _why(result: Result) -> str:
    return reason_of(result) if "ending" in result else "the client lost connections"
