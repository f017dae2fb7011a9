"""Test the pictures of several studies: files, watermark, legibility, determinism, bad tables."""

import itertools
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from connector_tax.artifacts.tables import ROW_TYPES, read_table
from connector_tax.config import ROOT, load_yaml
from connector_tax.figures import style
from connector_tax.figures.names import NAMES, draw
from connector_tax.figures.rates import rate_ticks
from connector_tax.figures.style import Picture
from connector_tax.figures.tables import StudyTables
from connector_tax.files import ArtifactError
from connector_tax.marks import DESIGN_MARKS, SPARE_MARKS, marks_of
from connector_tax.provenance.views import CLIP_PATH
from connector_tax.report.__main__ import write_views
from tests.figures.conftest import TablesOf
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import LABELS, Design

DRAW_ALL = """
import sys
from pathlib import Path
from connector_tax.figures import names, style
from connector_tax.figures.tables import StudyTables
study = StudyTables(Path(sys.argv[1]))
for name in names.NAMES:
    style.save(names.draw(study, name), study.root / "figures", name)
"""
HOSTILE = "<script>alert('$x_1$')</script> & \"co\""
DESIGNS = {
    "full": Design(),
    "one_block": Design(
        blocks=1,
        rates_rps=(2, 4, 8, 16),
        inputs=(512, 4096),
        outputs=(64, 256),
        skipped={"nixl_both": "pre-flight: NIXL is not installed (no module named 'nixl')"},
        void={("lmcache_only", "A", "r8"): "error_rate 0.2 > 0.01"},
    ),
    "no_steps": Design(step_timing=False, skipped={"noop_connector": "gate failed"}, ref_load=4),
    "overloaded_and_hostile": Design(
        labels=LABELS | {"mooncake_both": HOSTILE},
        overloaded={
            (config, cell): f"{config} saturated"
            for config in LABELS
            for cell in ("r4", "r8", "512x64", "32768x1024")
        },
    ),
    "few_short_labels_one_plain": Design(
        labels={"plain": "p", "noop_connector": "n", "mooncake_both": "m"},
        rates_rps=(2, 4, 8),
        plain_launches=1,
    ),
    "one_candidate": Design(
        labels={"plain": "baseline", "nixl_both": "nixl"}, rates_rps=(8,), ref_safe=8, ref_load=8
    ),
}


@pytest.fixture(scope="module", params=DESIGNS)
def pictures(request: pytest.FixtureRequest, tables_of: TablesOf) -> dict[str, Picture]:
    """Return every figure of one of the studies."""
    study = tables_of(DESIGNS[request.param])
    return {name: draw(study, name) for name in NAMES}


def _svg_texts(path: Path) -> list[str]:
    root = ET.parse(path).getroot()
    return [
        "".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")
    ]


def _drawn_texts(picture: Picture, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Bbox]]:
    """Return every text that is really drawn, with its extent in pixels of a PNG."""
    drawn: list[tuple[str, Bbox]] = []
    draw_text = Text.draw

    def draw_and_note(text: Text, renderer: RendererBase) -> None:
        draw_text(text, renderer)
        if text.get_visible() and text.get_text().strip():
            drawn.append((text.get_text(), text.get_window_extent(renderer)))

    monkeypatch.setattr(Text, "draw", draw_and_note)
    picture.figure.set_dpi(style.DPI)
    picture.figure.draw_without_rendering()
    placed = {(text, box.bounds): box for text, box in drawn}
    return [(text, box) for (text, _), box in placed.items()]


@pytest.mark.parametrize("name", NAMES)
def test_texts_stay_inside_the_figure_and_do_not_overlap(
    pictures: dict[str, Picture], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = pictures[name]
    width, height = picture.figure.canvas.get_width_height()
    texts = _drawn_texts(picture, monkeypatch)
    outside = [
        text
        for text, box in texts
        if box.x0 < -2 or box.y0 < -2 or box.x1 > width + 2 or box.y1 > height + 2
    ]
    assert outside == []
    # Boxes include ascent and descent of the font: less than a third of a line is no collision.
    clashes = [
        (one, other)
        for (one, a), (other, b) in itertools.combinations(texts, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 2 and min(a.y1, b.y1) - max(a.y0, b.y0) > 8
    ]
    assert clashes == []


def test_figures_fit_a_column_and_the_scorecard_a_page(pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        width, height = picture.figure.get_size_inches()
        assert width == (style.PAGE_IN if name == "scorecard" else style.COLUMN_IN)
        assert height < 7.5


def test_footer_has_at_most_two_lines_above_the_engine(pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        lines = [text.get_text() for text in picture.figure.texts if text.get_gid() != "engine"]
        notes = [line for line in lines if " · " not in line]
        assert len(notes) <= 2, (name, notes)


def test_labels_of_shipped_configurations_are_not_truncated() -> None:
    files = sorted((ROOT / "config").glob("*.yaml"))
    entries = [e for file in files for e in load_yaml(file).get("connectors") or ()]
    labels = {e["label"] for e in entries if isinstance(e, dict) and "label" in e} | {
        *LABELS.values()
    }
    assert "Mooncake both, own bootstrap" in labels
    for label in labels:
        assert style.fitted(label, style.LABEL_IN) == label
        title = style.in_two_lines(label, 1.3, style.TEXT_PT * 1.13)
        assert title.replace("\n", " ") == label
    assert style.in_two_lines("w" * 100, 1.3, style.TEXT_PT).count("\n") == 1


def test_smallest_text_has_a_readable_size(pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        artists = picture.figure.findobj(Text)
        texts = [text for text in artists if isinstance(text, Text) and text.get_text()]
        assert min(float(text.get_fontsize()) for text in texts) >= 6.5, name


def test_hostile_label_is_drawn_as_text(tables_of: TablesOf, tmp_path: Path) -> None:
    study = tables_of(DESIGNS["overloaded_and_hostile"])
    style.save(draw(study, "fig9_forest"), tmp_path, "fig9_forest")
    drawn = tmp_path / "fig9_forest.svg"
    assert "<script" not in drawn.read_text()
    assert any(text.startswith("<script>") for text in _svg_texts(drawn))


@pytest.mark.parametrize("emulated", [True, False])
def test_last_line_of_a_figure_names_the_engine_in_bold(
    tables_of: TablesOf, emulated: bool
) -> None:
    study = tables_of(Design(engine_label="real vLLM, GPU", emulated=emulated))
    engines = [
        (text.get_text(), text.get_fontweight())
        for text in draw(study, "fig2_tpot_vs_rate").figure.findobj(Text)
        if isinstance(text, Text) and text.get_gid() == "engine"
    ]
    assert engines == [("EMULATED, not vLLM" if emulated else "real vLLM, GPU", "bold")]


def test_marks_differ_for_any_number_of_configurations() -> None:
    known = [*DESIGN_MARKS.values(), *SPARE_MARKS]
    assert len({mark.color for mark in known}) == len({mark.marker for mark in known}) == len(known)
    assert {mark.marker for mark in known}.isdisjoint({"x", "X"})  # x is the saturation mark
    marks = marks_of([*DESIGN_MARKS, *(f"further_{number}" for number in range(60))])
    assert len({(m.color, m.marker, m.filled) for m in marks.values()}) == len(marks)
    assert list(marks.values())[: len(DESIGN_MARKS)] == list(DESIGN_MARKS.values())


def content(path: Path) -> bytes:
    """Return a picture's bytes; in an SVG, coordinates are rounded and clip paths have a common
    name.

    A coordinate halfway between two last digits is rounded up in one process and down in another.
    """
    if path.suffix != ".svg":
        return path.read_bytes()
    named = CLIP_PATH.sub(b"clip", path.read_bytes())
    return re.sub(rb"\d+\.\d{5,}", lambda found: b"%.4f" % float(found[0]), named)


@pytest.mark.workflow
def test_figures_are_byte_identical_across_processes(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s", DESIGNS["one_block"])
    command = [sys.executable, "-c", DRAW_ALL, str(study_file)]
    # This process has another seed.
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    drawn = {path.name: content(path) for path in (tmp_path / "s" / "figures").iterdir()}
    assert len(drawn) == 2 * len(NAMES)
    study = StudyTables(study_file)
    for name in NAMES:
        style.save(draw(study, name), tmp_path, name)
    differing = [name for name in drawn if content(tmp_path / name) != drawn[name]]
    assert differing == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_p90_ms", "ttft_ms", "cells.csv:1: missing column(s): ttft_p90_ms"),
        (",r0.5,0.5,", ",r0.5,fast,", "rate_rps: 'fast'; allowed"),
        (",r0.5,0.5,", ",r0.5,nan,", "rate_rps: 'nan'; allowed"),
    ],
)
def test_broken_table_is_refused_with_file_and_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    write_study(tmp_path / "s")
    path = tmp_path / "s" / "analysis" / "cells.csv"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ArtifactError) as error:
        read_table(path, ROW_TYPES[path.name])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rates", "labels"),
    [
        ((1.6, 1.8, 2.0), ["1.6", "1.8", "2"]),
        ((8.0, 110.0, 130.0, 240.0), ["8", "", "130", "240"]),
        ((8.0,), ["8"]),
    ],
)
def test_rate_is_unlabelled_only_where_the_next_is_near_on_the_axis(
    rates: tuple[float, ...], labels: list[str]
) -> None:
    axes = Figure().subplots()
    rate_ticks(axes, "x", rates, apart=0.1)
    assert [label.get_text() for label in axes.get_xticklabels()] == labels


def test_missing_table_is_named_and_nothing_is_drawn(tmp_path: Path) -> None:
    study_file = write_study(tmp_path / "s")
    (tmp_path / "s" / "analysis" / "effects.csv").unlink()
    with pytest.raises(ArtifactError, match=r"effects\.csv: no such file"):
        write_views(StudyTables(study_file))
    assert not (tmp_path / "s" / "figures").exists()


def test_every_figure_is_drawn_from_analysis_tables_and_names_its_engine(audited: Path) -> None:
    for name in NAMES:
        drawn = audited / "results" / "synthetic" / "figures" / f"{name}.svg"
        assert style.absent_because(drawn.read_bytes()) == ""
        assert drawn.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        texts = _svg_texts(drawn)
        assert "EMULATED, not vLLM" in texts
        assert any("embedded (emulated)" in text for text in texts)
