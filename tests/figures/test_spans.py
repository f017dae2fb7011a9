"""Test that the meaning of a step's spans follows the recorded settings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from connector_tax.artifacts.tables import table_text
from connector_tax.figures import steps
from connector_tax.figures.tables import StudyTables
from connector_tax.files import read_json, write_json, write_text
from tests.figures.figure_study import write_study
from tests.figures.figure_tables import LABELS, Design

V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    design = Design(blocks=1, rates_rps=(4, 8), inputs=(512,), outputs=(64,))
    return write_study(tmp_path_factory.mktemp("spans"), design).parent


def study_with(
    root: Path, device: str, settings: Mapping[str, str], *others: dict[str, Any]
) -> StudyTables:
    document = read_json(root / "study.json")
    document["config"]["engine"] = {"kind": "vllm", "label": "vLLM", "device": device}
    write_json(root / "study.json", document)
    plain = [{"config": "plain", "setting": n, "value": v} for n, v in settings.items()]
    rows = table_text("engine.csv", (*plain, *others))
    write_text(root / "analysis" / "engine.csv", rows)
    return StudyTables(root / "study.json")


SCHEDULED, EXECUTED = "async_scheduling", "executor"


@pytest.mark.parametrize(
    ("device", "settings", "present", "absent"),
    [
        ("cuda", {SCHEDULED: "true", EXECUTED: "uni", "model_runner": V2},
         ["was asynchronous", "V2 calls the worker's hooks", "lies in the engine step"],
         ["a ratio, not a part", "none is hidden"]),
        ("cuda", {SCHEDULED: "true", EXECUTED: "mp", "model_runner": V1},
         ["was asynchronous", "V1 calls the worker's hooks", "a ratio, not a part"],
         ["lies in the engine step"]),
        ("cuda", {SCHEDULED: "false", EXECUTED: "mp"},
         ["was synchronous", "in separate processes."],
         ["Model runner", "a ratio, not a part", "asynchronous"]),
        ("cuda", {}, ["no launch recorded how steps were scheduled"],
         ["Model runner", "The worker"]),
        ("emulated", {SCHEDULED: "true", "model_runner": V2},
         ["the device computes in parallel", "an idle device", "V2 calls"], ["GPU"]),
        ("cpu", {SCHEDULED: "false", EXECUTED: "uni", "model_runner": V1},
         ["none is hidden", "lies in the engine step"], ["the GPU", "Model runner"]),
    ],
)  # fmt: skip
def test_span_explanations_follow_the_recorded_settings(
    root: Path, device: str, settings: dict[str, str], present: list[str], absent: list[str]
) -> None:
    study = study_with(root, device, settings)
    text = f"{steps.hidden(study)} {steps.placed(study)}"
    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


@pytest.mark.parametrize(
    ("setting", "mine", "other", "sentence"),
    [
        (EXECUTED, "uni", "mp", "This does not hold for {}, whose settings differ."),
        (SCHEDULED, "true", "false", "Synchronous instead: {}."),
    ],
)
def test_span_explanations_name_configurations_with_other_settings(
    root: Path, setting: str, mine: str, other: str, sentence: str
) -> None:
    row = {"config": "noop_connector", "setting": setting, "value": other, "differs": True}
    study = study_with(root, "cuda", {setting: mine}, row)
    named = sentence.format(LABELS["noop_connector"])
    assert named in f"{steps.hidden(study)} {steps.placed(study)}"


def test_span_explanations_are_absent_for_the_embedded_engine(root: Path) -> None:
    study = study_with(root, "cuda", {"async_scheduling": "true"})
    del study.settings["engine"]["device"]
    assert (steps.hidden(study), steps.placed(study)) == ("", "")
