"""Many studies of one question, in the order given: each tax over all rates as a row, with a curve.

`connector-tax compare A B C ...`: vLLM 0.31, 0.32, 0.33. Each study's own number with its own
verdict; what is between two of them is compared by naming these two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from connector_tax import text
from connector_tax.artifacts.metrics import LATENCY_METRICS, VERDICT_METRICS
from connector_tax.artifacts.names import ALL_RATES
from connector_tax.artifacts.tables import EffectRow
from connector_tax.artifacts.verdicts import in_words
from connector_tax.compare.studies import NotComparableError, all_rates
from connector_tax.figures.resources import sign_of
from connector_tax.figures.tables import StudyTables
from connector_tax.report.templates import templates

STEP, HEIGHT, EDGE = 24, 36, 4  # of a curve, in its own units


@dataclass(frozen=True)
class Version:
    """One study's tax: as it reads, and as it is drawn; None where it has no number."""

    study: str
    row: EffectRow | None

    @property
    def words(self) -> str:
        """`+12 % [+10, +14] costs`, or why there is no number."""
        if self.row is None:
            return "not in the study"
        if self.row.estimate is None:
            return f"{self.row.status}: {self.row.reason}"
        said = self.row.mark or in_words(self.row.verdict, self.row.margin)
        return f"{text.tax(*self.row.shown)} {said}"

    @property
    def look(self) -> str:
        """The class of the cell."""
        return "" if self.row is None else sign_of(self.row.verdict)


def refuse_other_rates(studies: Sequence[StudyTables]) -> None:
    """Stop where a tax over all rates is over other rates in one of the studies.

    Raises:
        NotComparableError: with the study.
    """
    for study in studies[1:]:
        if all_rates(study) != all_rates(studies[0]):
            raise NotComparableError(
                f"{study.name}: its taxes are over other rates or shapes than {studies[0].name}'s"
            )


def versions(studies: Sequence[StudyTables]) -> Iterator[tuple[str, str, list[Version]]]:
    """Label, metric and versions of each configuration that one of the studies has."""
    labels = {item.id: item.label for study in studies for item in study.connectors}
    for config, label in labels.items():
        for metric in VERDICT_METRICS:
            taxes = [study.at(ALL_RATES, metric).get(config) for study in studies]
            own = [Version(s.name, row) for s, row in zip(studies, taxes, strict=True)]
            yield label, LATENCY_METRICS[metric].label, own


def curve(own: Sequence[Version]) -> str:
    """An SVG path: the estimates joined, an upright stroke for each interval, a line at zero."""
    shown = [None if of.row is None else of.row.shown for of in own]
    ends = [0.0, *(end for of in shown if of for end in of if end is not None)]
    low, scale = min(ends), (HEIGHT - 2 * EDGE) / ((max(ends) - min(ends)) or 1.0)

    def y(value: float) -> str:
        return f"{HEIGHT - EDGE - scale * (value - low):.1f}"

    path, move = f"M0 {y(0.0)}H{STEP * len(own)}", "M"
    strokes = ""
    for place, of in enumerate(shown):
        x = STEP * place + STEP // 2
        if of is None or of[0] is None:
            move = "M"
            continue
        path += f"{move}{x} {y(of[0])}"
        move = "L"
        if of[1] is not None and of[2] is not None:
            strokes += f"M{x} {y(of[1])}V{y(of[2])}"
    return path + strokes


def html(studies: Sequence[StudyTables]) -> str:
    """The whole page; it needs nothing else."""
    rows = [(*of, curve(of[2])) for of in versions(studies)]
    template = templates([Path(__file__).parent]).get_template("versions.html.j2")
    return template.render(studies=studies, rows=rows, step=STEP, height=HEIGHT) + "\n"
