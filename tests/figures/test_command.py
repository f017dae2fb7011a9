"""The command that draws the figures, on whole and on broken tables."""

from pathlib import Path

import pytest

from connector_tax.artifacts.table_reader import read_table
from connector_tax.artifacts.tables import ROW_TYPES
from connector_tax.figures.__main__ import main
from connector_tax.figures.names import NAMES
from connector_tax.files import ArtifactError
from tests.figures.figure_study import write_study


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ttft_p90_ms", "ttft_ms", "cells.csv:1: missing column(s): ttft_p90_ms"),
        (
            "\nplain,plain,0,A,r0.5,0.5,",
            "\nplain,plain,0,A,r0.5,fast,",
            "rate_rps: 'fast'; allowed",
        ),
        ("\nplain,plain,0,A,r0.5,0.5,", "\nplain,plain,0,A,r0.5,nan,", "rate_rps: 'nan'; allowed"),
    ],
)
def test_a_broken_table_is_refused_with_its_place(
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


def test_the_command_names_the_missing_file_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study_file = write_study(tmp_path / "s")
    (tmp_path / "s" / "analysis" / "effects.csv").unlink()
    assert main(["fig9_forest", "--study", str(study_file)]) == 2
    assert "effects.csv: no such file" in capsys.readouterr().err
    assert not (tmp_path / "s" / "figures").exists()


def test_every_figure_is_drawn_from_what_the_analysis_writes(audited: Path) -> None:
    for name in NAMES:
        text = (audited / "results" / "synthetic" / "figures" / f"{name}.csv").read_text()
        assert text.count("\n") > 4
        assert "absent_because" not in text
