"""Draws a dashboard with the data of its queries as SVG, about as Grafana shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

COLUMN_PX: Final = 50
ROW_PX: Final = 28
GAP_PX: Final = 4
TITLE_PX: Final = 46

BACK, PANEL, BORDER, TEXT, FAINT = "#111217", "#181b1f", "#2a2d33", "#d8d9da", "#8e8e99"
COLOURS: Final = (
    "#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#fade2a",
    "#96d98d", "#ffb357",
)  # fmt: skip
FONT: Final = 'font-family="Inter, Helvetica, Arial, sans-serif" font-size="11"'
STATES: Final = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
PER_SECOND: Final = {
    "cps": "c/s", "mps": "msg/s", "ops": "ops/s", "reqps": "req/s", "rowsps": "rows/s",
}  # fmt: skip
SECONDS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
COUNTS: Final = ((1e6, " Mil"), (1e3, " K"), (1, ""))

Json = dict[str, Any]


class Found(NamedTuple):
    """A series of a query: its legend, labels, and points of a time in seconds and a value."""

    legend: str
    labels: dict[str, str]
    points: list[tuple[float, float]]


Ask = Callable[[Json], list[Found]]
"""Returns the series of a target of a panel."""


class Box(NamedTuple):
    """A place of the picture in pixels."""

    x: float
    y: float
    width: float
    height: float


def drawing(dashboard: Json, ask: Ask) -> str:
    """Return the picture of a dashboard."""
    end = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in dashboard["panels"])
    width, height = 24 * COLUMN_PX + GAP_PX, end * ROW_PX + TITLE_PX
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {FONT}>',
        f'<rect width="{width}" height="{height}" fill="{BACK}"/>',
        _text(12, 30, dashboard["title"], size=18),
    ]
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        box = Box(
            at["x"] * COLUMN_PX + GAP_PX,
            at["y"] * ROW_PX + TITLE_PX,
            at["w"] * COLUMN_PX - GAP_PX,
            at["h"] * ROW_PX - GAP_PX,
        )
        parts += _panel(panel, box, ask)
    return "\n".join([*parts, "</svg>\n"])


def _panel(panel: Json, box: Box, ask: Ask) -> Iterator[str]:
    if panel["type"] == "row":
        yield _text(box.x + 6, box.y + 17, "⌄ " + panel["title"], size=14)
        return
    yield (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="2" '
        f'fill="{PANEL}" stroke="{BORDER}"/>'
    )
    yield _text(box.x + 8, box.y + 17, panel["title"], size=12)
    match panel["type"]:
        case "stat":
            yield from _number(panel, box, ask)
        case "table":
            yield from _table(panel, box, ask)
        case "timeseries":
            yield from _lines(panel, box, ask)
        case other:
            raise ValueError(f"{panel['title']}: nobody draws {other}")


def _number(panel: Json, box: Box, ask: Ask) -> Iterator[str]:
    [series] = ask(panel["targets"][0])
    value = series.points[-1][1]
    defaults = panel["fieldConfig"]["defaults"]
    colour = "green"
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or value >= step["value"]:
            colour = step["color"]
    middle = box.x + box.width / 2
    text = shown(value, defaults["unit"])
    yield _text(middle, box.y + 74, text, size=34, fill=STATES[colour], anchor="middle")


# --- tables -------------------------------------------------------------------------------------


def _table(panel: Json, box: Box, ask: Ask) -> Iterator[str]:
    options = panel["transformations"][1]["options"]
    order: dict[str, int] = options["indexByName"]
    renamed: dict[str, str] = options["renameByName"]
    labels = {label: renamed[label] for label in sorted(renamed, key=lambda each: order[each])}
    overrides = {
        each["matcher"]["options"]: {every["id"]: every["value"] for every in each["properties"]}
        for each in panel["fieldConfig"]["overrides"]
    }
    titles = list(labels.values())
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for target in panel["targets"]:
        how = overrides[f"Value #{target['refId']}"]
        titles.append(how["displayName"])
        for series in ask(target):
            key = tuple(series.labels.get(label, "") for label in labels)
            text = shown(series.points[-1][1], how["unit"])
            cells.setdefault(key, {})[how["displayName"]] = text
    step = box.width / len(titles)
    for at, title in enumerate(titles):
        yield _text(box.x + 10 + at * step, box.y + 42, title, fill="#6e9fff")
    for number, key in enumerate(sorted(cells)):
        y = box.y + 66 + 24 * number
        yield f'<path d="M{box.x} {y - 16}h{box.width}" stroke="{BORDER}"/>'
        row = dict(zip(labels.values(), key, strict=True)) | cells[key]
        for at, title in enumerate(titles):
            yield _text(box.x + 10 + at * step, y, row.get(title, ""))


# --- series over time ---------------------------------------------------------------------------


def _lines(panel: Json, box: Box, ask: Ask) -> Iterator[str]:
    found = [series for target in panel["targets"] for series in ask(target)]
    unit = panel["fieldConfig"]["defaults"]["unit"]
    plot = Box(box.x + 62, box.y + 30, box.width - 74, box.height - 76)
    values = [v for each in found for _, v in each.points if math.isfinite(v)]
    times = [t for each in found for t, _ in each.points]
    if not values:
        yield _text(box.x + box.width / 2, box.y + box.height / 2, "No data", anchor="middle")
        return
    start, end = min(times), max(times)
    step = _grid_step(max(values), unit)
    top = step * max(1, math.ceil(max(values) / step - 1e-9))
    yield from _grid(plot, unit, step, top)
    for part in range(5):
        x = plot.x + plot.width * part / 4
        at = datetime.fromtimestamp(start + (end - start) * part / 4, UTC)
        anchor = "end" if part == 4 else "middle"
        y = plot.y + plot.height + 15
        yield _text(x, y, f"{at:%H:%M:%S}", size=10, fill=FAINT, anchor=anchor)
    for number, series in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        points = [
            (
                round(plot.x + plot.width * (t - start) / ((end - start) or 1)),
                round(plot.y + plot.height * (1 - v / top)),
            )
            for t, v in series.points
            if math.isfinite(v)
        ]
        if points:
            yield f'<path d="{_path(points)}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
    yield from _legend(box, [each.legend for each in found])


def _path(points: list[tuple[int, int]]) -> str:
    """Return the commands of a line, relative ones: they are short."""
    x, y = points[0]
    steps = [f"{nx - px} {ny - py}" for (px, py), (nx, ny) in pairwise(points)]
    return "l".join([f"M{x} {y}", *steps])


def _grid(plot: Box, unit: str, step: float, top: float) -> Iterator[str]:
    for number in range(round(top / step) + 1):
        y = plot.y + plot.height * (1 - number * step / top)
        yield f'<path d="M{plot.x} {y:.1f}h{plot.width}" stroke="{BORDER}"/>'
        label = shown(number * step, unit)
        yield _text(plot.x - 6, y + 3.5, label, size=10, fill=FAINT, anchor="end")


def _grid_step(largest: float, unit: str) -> float:
    """Return a round distance of grid lines, so that there are three to six of them."""
    if largest <= 0:
        return 1.0
    rough = largest / 4
    units = {"s": SECONDS, "bytes": BYTES}.get(unit, ())
    unit_step = next((size for size, _ in units if 1 <= size <= largest), 1)
    size = unit_step * 10 ** math.floor(math.log10(rough / unit_step))
    return float(next(size * each for each in (1, 2, 2.5, 5, 10) if size * each >= rough * 0.99))


def _legend(box: Box, names: list[str]) -> Iterator[str]:
    """Yield one line of names; those that do not fit are counted."""
    x, y = box.x + 10, box.y + box.height - 10
    for number, name in enumerate(names):
        width = 24 + 6.1 * len(name)
        if x + width > box.x + box.width - 60 and number < len(names) - 1:
            yield _text(x, y, f"+{len(names) - number} more", fill=FAINT)
            return
        colour = COLOURS[number % len(COLOURS)]
        yield f'<rect x="{x:.0f}" y="{y - 5}" width="12" height="3" fill="{colour}"/>'
        yield _text(x + 16, y, name)
        x += width


# --- texts --------------------------------------------------------------------------------------


def shown(value: float, unit: str) -> str:
    """Return a value as Grafana shows it in a unit."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit in PER_SECOND:
        return f"{_short(value)} {PER_SECOND[unit]}"
    steps = {"s": SECONDS, "bytes": BYTES, "short": COUNTS}.get(unit, ((1, ""),))
    size, name = next((each for each in steps if abs(value) >= each[0]), steps[-1])
    if not value:
        size, name = 1, {"s": "s", "bytes": "B"}.get(unit, "")
    return f"{_short(value / size)}{'' if unit == 'short' else ' '}{name}".strip()


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def _text(
    x: float, y: float, text: str, *, size: int = 11, fill: str = TEXT, anchor: str = "start"
) -> str:
    more = "" if anchor == "start" else f' text-anchor="{anchor}"'
    more += "" if size == 11 else f' font-size="{size}"'
    return f'<text x="{x:.0f}" y="{y:.1f}" fill="{fill}"{more}>{escape(text)}</text>'
