"""What a span of the step probe is time of, said from what the launches recorded (engine.csv).

On a GPU the host hands work over and goes on; whether a request waits for what it does meanwhile
hangs on the scheduling, the model runner and the executor. Facts: docs/vllm.md.
"""

import re

from connector_tax.figures.tables import StudyTables

DECIDED_BY = ("async_scheduling", "model_runner", "executor")
STEP_FIGURES = ("fig6_step_cdf", "fig7_decomposition")
RUNNER_V2 = re.compile(r"\.worker\.\w+\.model_runner\.")


def hidden(study: StudyTables) -> str:
    """Whether a request waits for the host's spans: sentences, none of an engine but vLLM."""
    engine = study.settings.get("engine", {})
    if "device" not in engine:
        return ""
    if engine["device"] == "cpu":
        return "Every span is time of the CPU, which computes the model too: none is hidden."
    return f"Every span is time of the host, beside which the GPU computes. {_scheduling(study)}"


def placed(study: StudyTables) -> str:
    """Where the worker's spans lie in a step: sentences, none of an engine but vLLM."""
    if not hidden(study):
        return ""
    other = {row.config for row in study.engine if row.differs and row.setting in DECIDED_BY}
    labels = [item.label for item in study.configurations if item.id in other]
    exception = f"Not so of {', '.join(labels)}, whose settings differ."
    sentences = (_runner(study), _executor(study), exception if labels else "")
    return " ".join(sentence for sentence in sentences if sentence)


def _baselines(study: StudyTables, setting: str) -> str:
    """The value of a setting in the baseline's launches; empty where it is not known."""
    mine = (row for row in study.engine if row.config == study.baseline)
    return next((row.value for row in mine if row.setting == setting), "")


def _scheduling(study: StudyTables) -> str:
    asynchronous = _baselines(study, "async_scheduling")
    if asynchronous == "true":
        return (
            "Scheduling was asynchronous: a step is prepared while the GPU computes the one before,"
            " which hides what schedule() and the hooks take as far as the GPU takes longer; a"
            " request that meets an idle GPU waits for it."
        )
    if asynchronous == "false":
        return (
            "Scheduling was synchronous: the GPU waits for schedule(), and the whole engine step"
            " holds the GPU's time."
        )
    return "Whether the GPU hides it is not known: no launch recorded how steps were scheduled."


def _runner(study: StudyTables) -> str:
    runner = _baselines(study, "model_runner")
    if not runner or study.settings["engine"]["device"] == "cpu":
        return ""
    if RUNNER_V2.search(runner):
        return (
            "Model runner V2 calls the worker's hooks when forward pass and sampling are with the"
            " GPU; its record never holds the GPU's time."
        )
    return "Model runner V1 calls the worker's hooks between forward pass and sampling."


def _executor(study: StudyTables) -> str:
    executor = _baselines(study, "executor")
    if executor == "uni":
        return "The worker runs in the engine core's process: its record lies in the engine step."
    if executor != "mp":
        return ""
    beside = _baselines(study, "async_scheduling") == "true"
    share = ": a hook's share of the engine step is a ratio, not a part" if beside else ""
    return f"The worker runs in processes of its own{share}."
