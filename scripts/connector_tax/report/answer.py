"""The study's answer in one sentence, open questions, and the limits of the study.

Derived from the verdicts over all rates (docs/method.md, "Verdicts"); the numbers are on the
scorecard. Also hypotheses, success criteria and interim analyses, if the study covers them.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from rich.console import Console
from rich.table import Table

from connector_tax import text
from connector_tax.analysis.effect import MOST_BLOCKS, POWER
from connector_tax.analysis.hypotheses import ABOUT
from connector_tax.artifacts import paths
from connector_tax.artifacts.looks import decided_in
from connector_tax.artifacts.metrics import (
    ALL_METRICS,
    LATENCY_METRICS,
    judged_metrics,
    word_of,
)
from connector_tax.artifacts.names import ALL_RATES, PLAIN, cell_of_rate
from connector_tax.artifacts.stage_records import ConclusionRecord
from connector_tax.artifacts.tables import POOLED, TAX, EffectRow
from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    JUDGED,
    LESS,
    MIN_BLOCKS_FOR_VERDICT,
    TOO_FEW,
    costs,
    in_words,
    less,
)
from connector_tax.commands import UNREADABLE, run_command, study_parser
from connector_tax.figures import resources
from connector_tax.figures.compared import judged_load, ms
from connector_tax.figures.tables import StudyTables
from connector_tax.figures.taxes import other_waits
from connector_tax.foreign import one_line
from connector_tax.report.launches import overhead, read_launches

TABLE_WIDTH = 196
MORE = f"over {MOST_BLOCKS}"
AXES: dict[str, Literal["input_tokens", "output_tokens"]] = {
    "H5": "input_tokens",
    "H6": "output_tokens",
}
# Hypothesis -> its text, its meaning if supported, its meaning if refuted.
QUESTIONS = {
    "H1": (
        "The tax persists on a single instance under synthetic load",
        "one server pays the tax without transfers or peers: its cause is in the connector itself",
        "one idle server does not pay the prior's tax: transfers, peers or saturation may cause it",
    ),
    "H2": (
        "The NIXL–Mooncake gap is the connectors' own, not coupling",
        "the two implementations differ as much on one server as in a cluster",
        "the prior's gap came from its cluster, not from the two implementations alone",
    ),
    "H3": (
        "The framework is less than half of the Mooncake tax",
        "a change of the connector can save most of it",
        "another connector would cost nearly as much; only a change of vLLM can save it",
    ),
    "H4": (
        "Stacked connectors' taxes add up",
        "the cost of a stack can be predicted from its parts",
        "the parts share a cost or slow each other: each stack has to be measured",
    ),
    "H5": (
        "The TTFT tax grows with input length",
        "part of it is paid per prompt token: long prompts pay more",
        "it is the same percentage at every prompt length",
    ),
    "H6": (
        "The TPOT tax grows with output length",
        "later tokens pay more than early ones: long answers suffer most",
        "each token pays the same percentage, however long the answer",
    ),
}
REPORTED = {"met": "reported", "not met": "not reported"}


# Success criterion -> its text, and the hypotheses whose numbers it needs. Such a criterion only
# requires that the numbers exist.
CRITERIA: dict[int, tuple[str, tuple[str, ...]]] = {
    1: ("The Mooncake tax at ref_safe, compared with the prior", ("H1",)),
    2: ("The NIXL–Mooncake gap at ref_safe, compared with the prior", ("H2",)),
    3: ("The share of the no-op connector in the tax", ("H3",)),
    4: ("The departure from additivity", ("H4",)),
    5: ("Sign and size of the growth with length", ("H5", "H6")),
    6: ("All artifacts are present, every skip has a reason", ()),
    7: ("The measurements end in time", ()),
}

# Rows of one configuration, and its label.
Compared = tuple[str, list[EffectRow]]


def answer(study: StudyTables) -> str:
    """Return the costliest configurations and those below the margin, in at most 25 words."""
    compared = _compared(study)
    over = study.against(" over plain") if study.baseline != PLAIN else ""
    judged = {row.verdict for _, rows in compared for row in rows}
    if judged.isdisjoint(JUDGED):
        return f"No verdict{over}."
    first = f"No cost is proven{over}"
    if proven := _chosen(compared, lambda row: costs(row.verdict)):
        most = "costs most" if len(compared) > 1 else "costs"
        (label, rows), *others = _dearest(proven)
        taxes = [_each(rows, _tax), *_of_each(others, _tax)]
        first = f"{label} {most}{over}: {', '.join(taxes)}"
    cheap = [label for label, rows in compared if rows and all(less(r.verdict) for r in rows)]
    if not cheap:
        return f"{first}."
    margins = {row.margin for _, rows in compared for row in rows if less(row.verdict)}
    within = in_words(LESS, margins.pop()) if len(margins) == 1 else "less than the margin"
    named = f"{cheap[0]} costs" if len(cheap) == 1 else f"{len(cheap)} of {len(compared)} cost"
    return f"{first}; {named} {within}."


def load(study: StudyTables) -> str:
    """Return the load at which costs were measured, and latencies and costs at the highest rate.

    The latencies are the baseline's in ms; each configuration's cost is listed, saturated or not.
    """
    sweep, metrics = study.settings["phase_a"], judged_metrics(study.settings["statistics"])
    rate = max(sweep["rates_rps"])
    cell = cell_of_rate(rate)
    words = f"Over {judged_load(study)}."
    base = next((r for r in study.pooled if (r.config, r.cell) == (study.baseline, cell)), None)
    timed = [metric for metric in metrics if metric in LATENCY_METRICS]
    if base is None or not timed or base.number(f"{timed[0]}_ms") is None:
        return words
    levels = _joined(f"{word_of(m)} {ms((base.number(f'{m}_ms'), None, None))}" for m in timed)
    there = "There" if "concurrency" in sweep else f"At {rate:g}/s"
    words += f" {there} {study.label(study.baseline)} has {levels} ms"
    taxes = [row for row in study.of(TAX, "A") if row.cell == cell and row.estimate is not None]
    costs_there = [
        f"{item.label} {_joined(_tax(row) for row in tax_rows)}{_marks(study, tax_rows)}"
        for item in study.connectors
        if (tax_rows := [r for m in metrics for r in taxes if (r.config, r.metric) == (item.id, m)])
    ]
    over = f"; over it there: {', '.join(costs_there)}" if costs_there else ""
    return f"{words}{over}."


def _marks(study: StudyTables, taxes: Sequence[EffectRow]) -> str:
    """Return each mark of the taxes once, in brackets; "" if no tax is marked."""
    marks = dict.fromkeys(row.mark for row in taxes if row.mark)
    return f" ({study.labelled('; '.join(marks))})" if marks else ""


def notes(study: StudyTables) -> list[str]:
    """Return a sentence for each open question, with the measurement that would answer it."""
    compared = _compared(study)
    sentences: list[str] = []
    if chosen := _chosen(compared, lambda row: row.verdict == CANNOT_TELL):
        sentences.append(_undecided(study, chosen))
    if chosen := _chosen(compared, lambda row: row.huber_differs):
        opinion = "Huber's estimate, which is robust to single bad launches, gives another verdict"
        names = [f"{label} ({_metrics(rows)})" for label, rows in chosen]
        sentences.append(f"{opinion} for {_joined(names)}")
    if chosen := _chosen(compared, lambda row: row.verdict == TOO_FEW):
        sizes = _of_each(chosen, lambda row: text.tax(*row.change))
        few = f"{_too_few(study, chosen)} (a block takes {_block_minutes(study)} min)"
        sentences.append(f"{few}; point estimates are {_joined(sizes)}")
    if chosen := _chosen(compared, lambda row: row.mark or row.status != "valid"):
        sentences.append(_without_number(study, chosen))
    sentences += filter(None, [resources.exposed_words(study)])
    return [f"{words[0].upper()}{words[1:]}." for words in sentences]


def limits(study: StudyTables) -> str:
    """Return the limits of a study with this kind of engine, as sentences."""
    engine = study.settings["engine"]
    if study.emulated:
        return "The engine is emulated with costs set in a file: no number describes vLLM or a GPU."
    if engine.get("device_time"):
        return (
            "Measured without a GPU, with emulated step times: no number describes a GPU's"
            " latencies, memory or copies."
        )
    here = "It does not cover transfers between servers, or other models, loads or machines."
    if engine.get("device") == "cpu":
        return (
            "The model and the connectors' threads share CPU cores: no number describes a GPU."
            f" {here}"
        )
    return here


def _compared(study: StudyTables) -> list[Compared]:
    taxes = [study.at(ALL_RATES, metric) for metric in judged_metrics(study.settings["statistics"])]
    return [
        (item.label, [rows[item.id] for rows in taxes if item.id in rows])
        for item in study.connectors
    ]


def _chosen(compared: Sequence[Compared], wanted: Callable[[EffectRow], object]) -> list[Compared]:
    """Return the configurations with rows that satisfy `wanted`, and these rows."""
    chosen = [(label, [row for row in rows if wanted(row)]) for label, rows in compared]
    return [(label, rows) for label, rows in chosen if rows]


def _dearest(proven: Sequence[Compared]) -> list[Compared]:
    """Return the configurations with the largest tax of a metric, and these taxes."""
    by_label: dict[str, list[EffectRow]] = {}
    for metric in dict.fromkeys(row.metric for _, rows in proven for row in rows):
        taxes = [(row, label) for label, rows in proven for row in rows if row.metric == metric]
        if taxes:
            row, label = max(taxes, key=lambda tax: tax[0].estimate or 0)
            by_label.setdefault(label, []).append(row)
    return list(by_label.items())


def _joined(words: Iterable[str]) -> str:
    """Join names: 'a', 'a and b', 'a, b and c'."""
    listed = list(words)
    return " and ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:])))


def _each(rows: Sequence[EffectRow], words_of: Callable[[EffectRow], str]) -> str:
    """Return a phrase for each row and its metric, or one phrase if all are equal."""
    by_words: dict[str, list[str]] = {}
    for row in rows:
        by_words.setdefault(words_of(row), []).append(ALL_METRICS[row.metric].label)
    return _joined(f"{words} on {_joined(metrics)}" for words, metrics in by_words.items())


def _metrics(rows: Sequence[EffectRow]) -> str:
    return _joined(ALL_METRICS[row.metric].label for row in rows)


def _of_each(compared: Sequence[Compared], words_of: Callable[[EffectRow], str]) -> list[str]:
    return [f"{label} {_each(rows, words_of)}" for label, rows in compared]


def _tax(row: EffectRow) -> str:
    return text.tax(row.change[0])


def _undecided(study: StudyTables, chosen: Sequence[Compared]) -> str:
    needed = {
        label: ", ".join(
            f"{ALL_METRICS[row.metric].label} {row.blocks_needed or MORE}" for row in rows
        )
        for label, rows in chosen
    }
    names = _joined(f"{label} ({words})" for label, words in needed.items())
    valid = sorted({row.n_blocks or 0 for _, rows in chosen for row in rows})
    had = f"{valid[0]}" if len(valid) == 1 else f"{valid[0]} to {valid[-1]}"
    return (
        f"undecided: {names}. In brackets: the number of blocks that decides it in {POWER:.0%} of"
        f" studies. This study has {had}, and a block takes {_block_minutes(study)} min"
    )


def _block_minutes(study: StudyTables) -> str:
    minutes = overhead(read_launches(study)).wall_s / study.blocks / 60
    return f"{minutes:.0f}" if minutes >= 1 else "less than 1"


def _too_few(study: StudyTables, chosen: Sequence[Compared]) -> str:
    """Return a phrase on the number of valid blocks, and on the number that can prove a tax."""
    by_count: dict[int, list[str]] = {}
    for label, rows in chosen:
        by_count.setdefault(min(row.n_blocks or 0 for row in rows), []).append(label)
    if list(by_count) == [study.blocks]:
        so_far = "one block proves" if study.blocks == 1 else f"{study.blocks} blocks prove"
        return f"{so_far} nothing, {MIN_BLOCKS_FOR_VERDICT} can"
    can = f"and {MIN_BLOCKS_FOR_VERDICT} valid ones can prove a tax"
    if len(by_count) == 1:
        (count,) = by_count
        return f"{count} of {study.blocks} blocks {'is' if count == 1 else 'are'} valid, {can}"
    counts = (f"{count} for {_joined(labels)}" for count, labels in by_count.items())
    return f"valid blocks, of {study.blocks}: {', '.join(counts)}, {can}"


def _without_number(study: StudyTables, chosen: Sequence[Compared]) -> str:
    """Return which configurations have no usable tax, listed under the reason they share."""
    by_reason: dict[str, dict[str, None]] = {}
    for label, rows in chosen:
        for row in rows:
            by_reason.setdefault(row.mark or f"{row.status}: {row.reason}", {})[label] = None
    words = [f"{_joined(labels)} ({reason})" for reason, labels in by_reason.items()]
    return study.labelled(f"no verdict on {_joined(words)}")


# ---- hypotheses and criteria


def _has_question(study: StudyTables, hypothesis: str) -> bool:
    known = {item.id for item in study.configurations}
    if (axis := AXES.get(hypothesis)) and len({c[axis] for c in study.document["cells"]["B"]}) < 2:
        return False
    return known.issuperset(ABOUT[hypothesis])


def hypotheses(study: StudyTables) -> list[tuple[str, str, str, ConclusionRecord]]:
    """Return id, question, meaning and conclusion of each hypothesis that the study covers.

    H5 mentions configurations whose requests wait differently for the step with their prompt.
    """
    answers = []
    for item in study.hypotheses["hypotheses"]:
        name = str(item["id"])
        if not _has_question(study, name):
            continue
        question, supported, refuted = QUESTIONS[name]
        meaning = {"supported": f"It means: {supported}.", "refuted": f"It means: {refuted}."}.get(
            item["verdict"], f"If supported: {supported}. If refuted: {refuted}."
        )
        if name == "H5" and (waits := other_waits(study)):
            item = {**item, "sentence": f"{item['sentence']} {waits}."}
        answers.append((name, question, meaning, item))
    return answers


def looks(study: StudyTables) -> str:
    """Return what each interim analysis decided, and the launches saved; "" if none was run."""
    parts: list[str] = []
    known: set[str] = set()
    for taken in study.looks:
        decided = decided_in(taken).keys()
        new = [study.label(name) for name in decided if name not in known]
        known |= decided
        parts.append(f"{', '.join(new) or 'nothing'} after {taken['blocks']}")
    if not parts:
        return ""
    rows = [row for row in study.cell_rows if row.phase == "A" and row.block != POOLED]
    planned = {(row.config, row.block) for row in rows}
    run = {(row.config, row.block) for row in rows if row.status in ("valid", "void")}
    return (
        f"Interim analyses decided {', then '.join(parts)} blocks. Later blocks leave out decided"
        f" configurations, so {len(run)} of {len(planned)} launches of Phase A were measured"
    )


def not_asked(study: StudyTables) -> list[str]:
    """Return the hypotheses that need a configuration or length that the study lacks."""
    return [name for name in ABOUT if not _has_question(study, name)]


def criteria(study: StudyTables) -> list[tuple[str, str, str]]:
    """Return text, verdict and conclusion of each success criterion that applies to the study."""
    answers = []
    for item in study.hypotheses["criteria"]:
        words, needs = CRITERIA[int(item["id"])]
        if all(_has_question(study, name) for name in needs):
            verdict = REPORTED[item["verdict"]] if needs else item["verdict"]
            answers.append((words, verdict, item["sentence"]))
    return answers


# ---- the command


def main(argv: Sequence[str] | None = None) -> int:
    """Print the study's answer, its scorecard and the path of its report."""
    parser = study_parser("report.answer", main.__doc__)
    return run_command(parser, argv, _tell, UNREADABLE, label="answer: ")


def _tell(arguments: argparse.Namespace) -> None:
    study = StudyTables(arguments.study)
    headings, lines = resources.scores(study)
    shown = Table("", *headings, box=None, pad_edge=False)
    for label, cells in lines:
        shown.add_row(one_line(label), *(one_line(" ".join(filter(None, c.words))) for c in cells))
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    said = one_line(f"{study.engine_label}: {answer(study)}")
    console.print(f"\n{said}", soft_wrap=True, markup=False)
    console.print(shown, markup=False)
    for words in (
        load(study),
        *notes(study),
        limits(study),
        f"Report: {study.root / paths.REPORT}",
    ):
        console.print(one_line(words), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
