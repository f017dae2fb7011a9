"""What the report says of resources, and of what else differs between plain and a configuration."""

from dataclasses import dataclass

from connector_tax.artifacts.names import PLAIN
from connector_tax.artifacts.tables import EngineRow, ResourceRow
from connector_tax.figures.fig10_resources import PANELS, decimals, number_text
from connector_tax.figures.tables import StudyTables


@dataclass(frozen=True)
class Overview:
    """Differences from plain, one line for each configuration, one column for each resource.

    Attributes:
        headings: the resources that were read, in words.
        plain: plain's values.
        lines: configuration to its differences; a dash where there is none.
    """

    headings: list[str]
    plain: list[str]
    lines: dict[str, list[str]]


def overview(study: StudyTables) -> Overview:
    """The resources at a glance; without columns where nothing was recorded."""
    valid = {(r.config, r.resource): r for r in study.resources if r.status == "valid"}
    shown = [name for name in PANELS if any(resource == name for _, resource in valid)]
    digits = {
        name: decimals([r.difference or 0.0 for (_, n), r in valid.items() if n == name])
        for name in shown
    }
    plain = []
    for name in shown:
        values = [r.plain_mean for (_, n), r in valid.items() if n == name]
        value = next((v for v in values if v is not None), None)
        plain.append("–" if value is None else number_text(value, decimals([value]))[1:])
    lines = {
        item.id: [_cell(valid.get((item.id, name)), digits[name]) for name in shown]
        for item in study.connectors
    }
    return Overview([PANELS[name] for name in shown], plain, lines)


def _cell(row: ResourceRow | None, digits: int) -> str:
    if row is None or row.difference is None:
        return "–"
    text = number_text(row.difference, digits)
    if row.difference_lo is None or row.difference_hi is None:
        return text
    ends = (number_text(end, digits) for end in (row.difference_lo, row.difference_hi))
    return f"{text} [{', '.join(ends)}]"


def not_recorded(study: StudyTables) -> str | None:
    """Why no resource was recorded at all; None where some were."""
    if any(row.status == "valid" for row in study.resources):
        return None
    return next((row.reason for row in study.resources if row.reason), "no launch was measured")


def also_differs(study: StudyTables) -> dict[str, str]:
    """Configuration to the settings in which its engine is not as plain's, in words."""
    return {row.config: row.also_differs for row in study.engine if row.also_differs}


def same_everywhere(study: StudyTables) -> list[EngineRow]:
    """Plain's known settings that every configuration with settings has too."""
    other = {row.setting for row in study.engine if row.differs}
    unknown = {row.setting for row in study.engine if row.setting and not row.value}
    return [
        row
        for row in study.engine
        if row.config == PLAIN and row.value and row.setting not in other | unknown
    ]
