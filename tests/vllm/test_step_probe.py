"""Test the step and settings probes on a stub engine, and the records as JSON lines."""

import json
import os
import subprocess
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.files import read_json
from connector_tax.servers.kinds import STEP_LOG_PREFIX
from connector_tax.study.steplog import LaunchStepLog
from connector_tax.vllm import overlay, settings_probe
from connector_tax.vllm.step_probe.log import mark
from connector_tax.vllm.step_probe.probe import STEPS_OF_A_RANK, Probe
from connector_tax.vllm.step_records import ask_to_write, step_records
from tests.shared import VLLM
from tests.vllm import stub

# Records have four digits, so a sum of two may be off by this share.
ROUNDING = 1e-3


class Stubbed:
    """The stub engine with both probes, in its own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = stub.write(folder / "site")
        self.log: Path | None = folder / "log"
        overlay.install(folder / "overlay")

    def drive(self, **options: Any) -> str:
        return stub.drive(self.tree, self.folder / "overlay", self.log, **options)

    def records(self, process: str) -> list[Any]:
        assert self.log is not None
        return stub.records(self.log, process)

    def settings(self, part: str) -> dict[str, Any]:
        settings: dict[str, Any] = read_json(Path(f"{self.log}.{part}.settings"))["settings"]
        return settings


@pytest.fixture
def stubbed(tmp_path: Path) -> Stubbed:
    return Stubbed(tmp_path)


def test_plain_records_each_step_in_both_processes_without_callbacks(stubbed: Stubbed) -> None:
    stubbed.drive()
    scheduler, worker = (stubbed.records(p) for p in ("scheduler", "worker"))
    assert [r["step_id"] for r in scheduler] == [1, 2, 3, 4, 5, 6]
    assert [r["step_id"] for r in worker] == [1, 2, 3, 4, 5, 6]
    for record in (*scheduler, *worker):
        assert [record[k] for k in ("build_meta_us", "get_finished_us", "start_load_kv_us")] == [
            None
        ] * 3
        assert "hooks_us" not in record
        assert record["step_duration_us"] > 0
    for record in scheduler:
        spent = record["step_duration_us"] + record["update_us"]
        assert record["engine_step_us"] >= spent * (1 - ROUNDING)
    assert all(r["num_running"] == 1 for r in scheduler)


def test_prefill_and_decode_tokens_are_counted_separately(stubbed: Stubbed) -> None:
    stubbed.drive(prompt=201)
    seen = [(r["prefill_tokens"], r["decode_tokens"]) for r in stubbed.records("scheduler")]
    # The last chunk of the prompt is one token, like a decode step, and still counts as prefill.
    assert seen == [(100, 0), (100, 0), (1, 0), (0, 1), (0, 1), (0, 1)]


def test_preempted_prompt_is_counted_once_in_each_step(tmp_path: Path) -> None:
    probe = Probe(str(tmp_path / "steps"))
    request = SimpleNamespace(num_tokens=100, num_computed_tokens=0)
    scheduler = SimpleNamespace(requests={"a": request})
    first = SimpleNamespace(req_id="a", prompt_token_ids=[0] * 100, num_computed_tokens=0)

    def step(count: int, *, new: bool = False, resumed: bool = False) -> int:
        request.num_computed_tokens = 0 if new or resumed else request.num_computed_tokens
        request.num_computed_tokens += count
        cached = SimpleNamespace(resumed_req_ids={"a"} if resumed else set())
        output = SimpleNamespace(
            scheduled_new_reqs=[first] if new else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"a": count},
        )
        return probe.prefill_tokens(scheduler, output)

    assert step(60, new=True) == 60
    assert step(70, resumed=True) == 70
    assert step(30) == 30
    assert step(1) == 0


@pytest.mark.parametrize("sampling", [True, False])
def test_each_hook_is_timed_where_it_runs(stubbed: Stubbed, sampling: bool) -> None:
    stubbed.drive(connector="One", sampling=sampling)
    for record in stubbed.records("scheduler"):
        assert 300 <= record["build_meta_us"] <= record["step_duration_us"]
        assert record["get_finished_us"] is None
        assert record["start_load_kv_us"] is None
        assert set(record["hooks_us"]) == {"update_connector_output"}
    for record in stubbed.records("worker"):
        assert record["build_meta_us"] is None
        assert record["start_load_kv_us"] is not None
        assert 200 <= record["get_finished_us"] <= record["step_duration_us"]
        assert set(record["hooks_us"]) == {"wait_for_save"}


def test_update_is_recorded_with_its_step_under_asynchronous_scheduling(stubbed: Stubbed) -> None:
    stubbed.drive(connector="One", asynchronous=True)
    scheduler = stubbed.records("scheduler")
    # The sixth step was scheduled and not updated before the engine stopped.
    assert [r["step_id"] for r in scheduler] == [1, 2, 3, 4, 5]
    for record in scheduler:
        update = record["hooks_us"]["update_connector_output"]
        assert 100 * record["step_id"] <= update <= record["update_us"]
        assert record["engine_step_us"] is not None
    assert [r["step_id"] for r in stubbed.records("worker")] == [1, 2, 3, 4, 5, 6]


def test_children_of_a_multi_connector_are_timed_under_their_configured_names(
    stubbed: Stubbed,
) -> None:
    output = stubbed.drive(connector="MultiConnector")
    for record in stubbed.records("scheduler"):
        children = record["children_us"]
        assert list(children) == ["FirstName", "SecondName"]
        spent = sum(times["build_connector_meta"] for times in children.values())
        assert 600 <= spent <= record["build_meta_us"] * (1 + ROUNDING)
    for record in stubbed.records("worker"):
        assert all(
            {"get_finished", "start_load_kv"} == set(times)
            for times in record["children_us"].values()
        )
    assert "watches MultiConnector > FirstName > SecondName (WORKER)" in output


def test_without_a_log_path_nothing_is_wrapped(stubbed: Stubbed) -> None:
    check = "assert type(engine).step.__name__ == 'step', type(engine).step"
    stubbed.log = None
    stubbed.drive(before=CONFIG + START + check)
    written = {path.name for path in stubbed.folder.iterdir()}
    assert written == {"site", "overlay"}


def test_probe_error_is_logged_once_and_does_not_reach_the_engine(
    stubbed: Stubbed,
) -> None:
    breaks = "type(scheduler).get_request_counts = lambda self: 1 / 0"
    output = stubbed.drive(connector="One", before=breaks)
    assert "answers 6" in output
    assert output.count("step probe switched off: ZeroDivisionError") == 1


def test_missing_log_folder_switches_the_probe_off_and_the_engine_serves(stubbed: Stubbed) -> None:
    stubbed.log = stubbed.folder / "missing" / "log"
    output = stubbed.drive()
    assert "answers 6" in output
    assert output.count("step probe switched off: FileNotFoundError") == 1


def test_an_engine_error_passes_through_unchanged(stubbed: Stubbed) -> None:
    fails = """
def broken(self, output):
    raise RuntimeError("the model broke")
Worker.execute_model = broken
try:
    scheduler.add("b", 5)
    engine.step_fn()
except RuntimeError as error:
    print("caught", error)
del Worker.execute_model
Worker.execute_model = lambda self, output: "result"
"""
    assert "caught the model broke" in stubbed.drive(before=fails)


def described(tree: Path) -> dict[str, Any]:
    """Return hook_points.py's description of the vLLM in `tree`."""
    done = subprocess.run(
        [sys.executable, Path(overlay.__file__).with_name("step_probe") / "hook_points.py"],
        env={**os.environ, "PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
    )
    content: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return content


@pytest.mark.parametrize(
    ("cut", "named"),
    [
        ("def update_from_output", "vllm.v1.core.sched.scheduler.Scheduler.update_from_output"),
        ("def step_with_batch_queue", "vllm.v1.engine.core.EngineCore.step_with_batch_queue"),
        ("scheduled_new_reqs: list", "SchedulerOutput.scheduled_new_reqs"),
        ("def start_load_kv", "KVConnectorBase_V1.start_load_kv"),
        ("def create_connector", "KVConnectorFactory.create_connector"),
    ],
)
def test_vllm_without_a_hook_is_refused_and_the_hook_named(
    stubbed: Stubbed, cut: str, named: str
) -> None:
    for path in stubbed.tree.rglob("*.py"):
        path.write_text(path.read_text().replace(cut, cut.replace("_", "_other_")))
    missing = described(stubbed.tree)["missing"]
    assert any(named in entry for entry in missing), missing


def test_hook_that_is_not_callable_counts_as_missing(stubbed: Stubbed) -> None:
    path = stubbed.tree / "vllm/v1/core/sched/scheduler.py"
    path.write_text(path.read_text() + "\nScheduler.schedule = None\n")
    (missing,) = described(stubbed.tree)["missing"]
    assert "Scheduler.schedule (TypeError: not callable)" in missing


def test_vllm_without_a_hook_point_stays_unwrapped_and_the_log_names_it(stubbed: Stubbed) -> None:
    path = stubbed.tree / "vllm/v1/core/sched/output.py"
    path.write_text(path.read_text().replace("num_scheduled_tokens: dict", "other_tokens: dict"))
    output = stubbed.drive()
    assert "not installed; this vLLM lacks" in output
    assert "SchedulerOutput.num_scheduled_tokens" in output
    assert "answers 6" in output
    # The settings probe depends on other parts of vLLM.
    assert [path.name for path in stubbed.folder.glob("log*")] == ["log.engine.settings"]


@pytest.mark.parametrize(
    "definition",
    [
        "def start_load_kv(self, context, depth=3, *, sort='x', **kwargs): assert depth == 3",
        "def start_load_kv(self, start): assert start is None",
        "def start_load_kv(self, context, now=None): assert now is None",
        "def start_load_kv(*args): assert args[1:] == (None,)",
        "@given\ndef start_load_kv(self, context, added): assert added == 'by the decorator'",
        "@kept_back\ndef start_load_kv(self): pass",
    ],
)
def test_wrapped_hook_receives_its_arguments_unchanged(stubbed: Stubbed, definition: str) -> None:
    path = stubbed.tree / "vllm/distributed/kv_transfer/kv_connector/factory.py"
    decorator = """
from functools import wraps
def given(hook):
    @wraps(hook)
    def outer(self, context):
        hook(self, context, "by the decorator")
    return outer
def kept_back(hook):
    @wraps(hook)
    def outer(self, context):
        hook(self)
    return outer
"""
    method = "\n".join(f"    {line}" for line in definition.splitlines())
    text = path.read_text().replace("class One(", f"{decorator}\nclass One(", 1)
    path.write_text(text.replace("    def get_finished", f"{method}\n\n    def get_finished", 1))
    assert "answers 6" in stubbed.drive(connector="One")
    for record in stubbed.records("worker"):
        assert record["start_load_kv_us"] is not None


@pytest.mark.parametrize("kind", ["process", "fork"])
def test_terminated_process_writes_its_recorded_steps(stubbed: Stubbed, kind: str) -> None:
    # vLLM's processes turn SIGTERM into SystemExit.
    here = """
import multiprocessing, os, signal
def leave(*_):
    raise SystemExit(0)
def run():
    signal.signal(signal.SIGTERM, leave)
    scheduler.add("b", 250)
    for _ in range(6):
        engine.step_fn()
    os.kill(os.getpid(), signal.SIGTERM)
if options["kind"] == "fork":
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(30)
    print("answers", child.exitcode)
    sys.exit(0)
run()
"""
    stubbed.drive(connector="One", before=here, kind=kind)
    for process in ("scheduler", "worker"):
        steps = [record["step_id"] for record in stubbed.records(process)]
        assert steps == [1, 2, 3, 4, 5, 6]


KILLED = """
import os, socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from connector_tax.vllm.step_records import ask_to_write
scheduler.add("b", 250)
for _ in range(6):
    engine.step_fn()
os.chdir(Path(options["log"]).parent)
for _ in range(20):
    # Requests a write and does not wait for the reply.
    with socket.socket(socket.AF_UNIX) as hasty:
        hasty.connect("log.scheduler.socket")
        hasty.sendall(b"ww")
ask_to_write(Path(options["log"] + ".scheduler.steps"))
engine.step_fn()
# Like SIGKILL, this ends the process without a write.
os._exit(0)
"""


def test_flushed_steps_survive_a_later_kill(stubbed: Stubbed) -> None:
    # A folder whose name is too long for a socket's address.
    folder = stubbed.folder / ("long" * 30)
    folder.mkdir()
    stubbed.log = folder / "log"
    output = stubbed.drive(before=KILLED, log=str(stubbed.log))
    assert "switched off" not in output
    assert [r["step_id"] for r in stubbed.records("scheduler")] == [1, 2, 3, 4, 5, 6]
    # The first step is written when it opens the file.
    assert [r["step_id"] for r in stubbed.records("worker")] == []
    assert (folder / "log.scheduler.socket").stat().st_mode & 0o022 == 0
    # The process has ended, so this does nothing.
    ask_to_write(folder / "log.scheduler.steps")


def test_many_steps_are_written_completely_in_parts(stubbed: Stubbed) -> None:
    few = "sys.modules['connector_tax_step_probe.log'].HELD_NUMBERS = 100"
    stubbed.drive(connector="One", before=few, steps=200)
    for process in ("scheduler", "worker"):
        steps = [record["step_id"] for record in stubbed.records(process)]
        assert steps == list(range(1, 201))


def test_full_disk_leaves_no_truncated_number_in_the_step_file(stubbed: Stubbed) -> None:
    # The limit is lifted at the end of the process, which then writes once more.
    full = """
import resource
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (2045, unlimited[1]))
sys.modules["connector_tax_step_probe.log"].HELD_NUMBERS = 100
scheduler.add("b", 250)
for _ in range(100):
    engine.step_fn()
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
"""
    output = stubbed.drive(connector="One", before=full)
    assert output.count("step probe switched off: OSError: [Errno 27]") == 1
    assert "answers 6" in output
    for process in ("scheduler", "worker"):
        records = stubbed.records(process)
        assert [record["step_id"] for record in records] == list(range(1, len(records) + 1))
        assert all(0 < record["step_duration_us"] < 1e6 for record in records)
        assert len(records) > 10


def test_second_process_does_not_write_to_an_existing_step_file(stubbed: Stubbed) -> None:
    stubbed.drive()
    file = stubbed.folder / "log.worker.steps"
    first = file.read_bytes()
    output = stubbed.drive()
    assert "answers 6" in output
    assert output.count("step probe switched off: FileExistsError") == 1
    assert file.read_bytes() == first


def test_data_parallel_engine_cores_write_separate_files(stubbed: Stubbed) -> None:
    folder = stubbed.folder
    stubbed.log = folder / STEP_LOG_PREFIX
    log = LaunchStepLog(folder, VLLM)
    log.mark()
    for rank in (0, 1):
        stubbed.drive(rank=rank)
    names = sorted(path.name.split(".")[1] for path in folder.glob("*.steps"))
    assert names == ["scheduler", "scheduler2", "worker", "worker2"]
    steps = [json.loads(line) for line in log.take(0, 0).splitlines()]
    wanted = [first + step for first in (0, STEPS_OF_A_RANK) for step in range(1, 7)]
    for process in ("scheduler", "worker"):
        assert [r["step_id"] for r in steps if r["process"] == process] == wanted
    log.remove()
    assert not list(folder.glob("*.steps"))


# ---- the settings probe: the configuration that a starting vLLM has resolved

# A resolved configuration of vLLM; the worker has more of it than the engine core.
CONFIG = """
import enum
class Mode(enum.Enum):
    FULL_AND_PIECEWISE = (2, 1)
def space(**values):
    return SimpleNamespace(**values)
class Uniproc:
    pass
config = space(
    cache_config=space(kv_cache_layout="HND", num_gpu_blocks=100, block_size=16, cache_dtype="auto",
                       kv_cache_size_tokens=1600, enable_prefix_caching=True),
    parallel_config=space(distributed_executor_backend=Uniproc, tensor_parallel_size=1),
    scheduler_config=space(async_scheduling=None, disable_hybrid_kv_cache_manager=True,
                           enable_chunked_prefill=True, max_num_batched_tokens=8192),
    model_config=space(max_model_len=4096, enforce_eager=False, dtype="torch.bfloat16"),
    compilation_config=space(cudagraph_mode=Mode.FULL_AND_PIECEWISE, mode=None),
)
class Backend:
    @staticmethod
    def get_name():
        return "FLASH_ATTN"
class ModelRunner:
    attn_groups = [[space(backend=Backend), space(backend=Backend)]]
"""
START = """
scheduler = Scheduler(None, config)
worker.initialize_from_config([(config, ModelRunner())])
"""


def test_settings_file_holds_resolved_values_and_reasons_for_missing_ones(stubbed: Stubbed) -> None:
    stubbed.drive(before=CONFIG + START)
    engine = stubbed.settings("engine")
    assert engine.keys() == settings_probe.ENGINE.keys()
    assert engine["kv_cache_layout"] == ["HND", None]
    assert engine["kv_blocks"] == [100, None]
    assert engine["executor"] == ["__main__.Uniproc", None]
    assert engine["hybrid_kv_cache_manager"] == [False, None]
    assert engine["async_scheduling"] == [None, "this vLLM leaves it unset"]
    value, reason = engine["max_num_seqs"]
    assert value is None
    assert "max_num_seqs" in reason
    assert stubbed.settings("worker") == {
        "attention_backend": ["FLASH_ATTN", None],
        "cudagraph_mode": ["FULL_AND_PIECEWISE", None],
        "compilation_mode": [None, "this vLLM leaves it unset"],
        "model_runner": ["__main__.ModelRunner", None],
    }


def test_only_the_first_worker_writes_settings(stubbed: Stubbed) -> None:
    second = "worker.global_rank = 1\nworker.initialize_from_config([0, (config, ModelRunner())])"
    stubbed.drive(before=CONFIG + second)
    assert not (stubbed.folder / "log.worker.settings").exists()


def test_engine_serves_if_its_settings_cannot_be_written(stubbed: Stubbed) -> None:
    stubbed.log = stubbed.folder / "missing" / "log"
    output = stubbed.drive(before=CONFIG + START, steps=0)
    assert "settings probe: nothing written" in output
    assert "answers 0" in output


def test_only_the_first_data_parallel_engine_core_writes_settings(stubbed: Stubbed) -> None:
    second = "config.parallel_config.data_parallel_index = 1\n"
    stubbed.drive(before=CONFIG + second + START, rank=1)
    assert not list(stubbed.folder.glob("*.settings"))


AT = 1000.0
SCHEDULE, UPDATE, STEP = mark(0), mark(1), mark(2)
EXECUTE, SAMPLE = mark(0), mark(1)


def header(process: str = "worker", groups: Any = ()) -> bytes:
    return json.dumps({"process": process, "groups": groups}).encode() + b"\n"


def packed(*numbers: float) -> bytes:
    return array("d", numbers).tobytes()


def executed(at: float, step: int, seconds: float, complete: bool = True) -> list[float]:
    return [at, at + seconds, step, complete, EXECUTE]


def calls_at(at: float, *microseconds_or_marks: float) -> list[float]:
    return [at + n / 1e6 if n >= 0 else n for n in microseconds_or_marks]


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=8), st.data())
def test_step_file_truncated_at_any_byte_gives_its_complete_steps(
    starts: list[float], data: Any
) -> None:
    packs = [packed(*executed(t, step, 5e-6)) for step, t in enumerate(starts, 1)]
    file = header() + b"".join(packs)
    whole = list(step_records(file))
    assert [r["step_id"] for r in whole] == list(range(1, len(starts) + 1))
    assert all(-2 < t * 1e9 - r["t_ns"] < 10_002 for t, r in zip(starts, whole, strict=True))
    cut = data.draw(st.integers(0, len(file)))
    left = max(0, cut - len(header())) // len(packs[0])
    assert list(step_records(file[:cut])) == whole[:left]
    # A second read from the end of the first returns the remaining steps.
    end = len(header()) + left * len(packs[0])
    assert list(step_records(file, end)) == whole[left:]


def test_file_that_is_not_a_step_file_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        list(step_records(b'{"t_ns":1}\n'))


def test_nested_hook_counts_in_the_outer_hook_except_in_a_child_connector() -> None:
    own = ["get_finished", "get_transfer_results", "wait_for_save"]
    groups = [(None, own, 3), ("Child", ["get_finished"], 6)]
    # get_transfer_results (4) for 9 us: get_finished (3) of the same object for 7, in it the
    # child's (6) for 5; then get_finished alone for 1, and wait_for_save (5) for 3 and for 4.
    calls = calls_at(AT, 2, 7, mark(6), 1, 8, mark(3), 0, 9, mark(4), 20, 21, mark(3))
    calls += calls_at(AT, 30, 33, mark(5), 40, 44, mark(5))
    content = header(groups=groups) + packed(*calls, *executed(AT, 1, 50e-6))
    (record,) = step_records(content)
    assert record["hooks_us"] == {"wait_for_save": 7.0}
    assert record["get_finished_us"] == 10.0
    assert record["children_us"] == {"Child": {"get_finished": 5.0}}
    assert record["start_load_kv_us"] is None
    assert record["num_running"] is None


def test_hook_times_of_children_with_the_same_name_are_summed() -> None:
    groups = [(None, [], 3), ("Twin", ["start_load_kv"], 3), ("Twin", ["start_load_kv"], 4)]
    calls = calls_at(AT, 0, 1, mark(3), 2, 5, mark(4))
    (record,) = step_records(header(groups=groups) + packed(*calls, *executed(AT, 1, 9e-6)))
    assert record["children_us"] == {"Twin": {"start_load_kv": 4.0}}
    assert record["hooks_us"] == {}


def test_worker_step_sums_execution_and_sampling_and_skips_warm_up() -> None:
    groups = [(None, ["wait_for_save"], 3)]
    hook, sampling = calls_at(AT, 11, 12, mark(3)), calls_at(AT, 10, 14, SAMPLE)
    both = [*executed(AT, 1, 9e-6, complete=False), *hook, *sampling]
    warm_up = [*hook, *executed(AT, 0, 9e-6, complete=False), *hook, *sampling]
    # Step 2 has no sampling: the call of step 3 follows directly.
    alone = [*executed(AT, 2, 7e-6, complete=False), *executed(AT, 3, 5e-6)]
    records = list(step_records(header(groups=groups) + packed(*warm_up, *both, *warm_up, *alone)))
    assert [record["step_duration_us"] for record in records] == [13.0, 7.0, 5.0]
    assert [record["hooks_us"] for record in records] == [{"wait_for_save": 1.0}, {}, {}]


def test_update_is_recorded_with_the_step_it_names() -> None:
    counts = {"num_running": 3, "num_waiting": 2, "prefill_tokens": 100, "decode_tokens": 7}
    groups = [(None, ["on_new_request", "build_connector_meta", "take_events"], 3)]

    def schedule(step: int) -> list[float]:
        return [AT, AT + 1.234e-6, step, *counts.values(), SCHEDULE]

    def hook(position: int, microseconds: float) -> list[float]:
        return calls_at(AT + position, 0, microseconds, mark(position))

    def update(step: int, microseconds: float) -> list[float]:
        return [AT, AT + microseconds / 1e6, step, UPDATE]

    engine_step = calls_at(AT, 0, 0.099, STEP)
    content = header("scheduler", groups)
    content += packed(*hook(3, 5), *hook(4, 1), *schedule(1), *engine_step)
    # The second engine step schedules step 2 and updates step 1, with a hook in each; then a hook
    # before the third, which updates a step that was not recorded.
    content += packed(*hook(4, 2), *schedule(2), *hook(5, 9), *update(1, 2.5), *engine_step)
    content += packed(*hook(3, 6), *schedule(3), *update(77, 1), *engine_step)
    content += packed(*update(2, 3.5), *engine_step)
    one, two = step_records(content)
    assert (one["step_id"], one["update_us"], one["engine_step_us"]) == (1, 2.5, 0.1)
    assert (one["build_meta_us"], one["hooks_us"]) == (1.0, {"on_new_request": 5, "take_events": 9})
    assert (two["step_id"], two["update_us"], two["engine_step_us"]) == (2, 3.5, 0.1)
    assert (two["build_meta_us"], two["hooks_us"]) == (2.0, {})
    assert {name: number for name, number in one.items() if name in counts} == counts
    assert one["step_duration_us"] == 1.2


def test_step_without_update_has_no_update_time() -> None:
    content = header("scheduler")
    for step in range(1, 70):
        content += packed(AT, AT + 1e-6, step, 1, 0, 0, 1, SCHEDULE, AT, AT + 2e-6, STEP)
    records = list(step_records(content))
    assert [record["step_id"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["update_us"] for record in records] == [None] * 5


@given(st.floats(1e-7, 1e3))
def test_spans_are_rounded_to_four_digits_or_a_tenth_of_a_microsecond(seconds: float) -> None:
    (record,) = step_records(header() + packed(*executed(0.0, 1, seconds)))
    exact = seconds * 1e6
    given_us = record["step_duration_us"]
    assert abs(given_us - exact) <= max(0.0501, 0.000501 * exact)
    assert len(f"{given_us:.1f}".replace(".", "").lstrip("0").rstrip("0")) <= 4
