"""Test that switching off restores vLLM's functions, and switching on the probe's functions."""

import json
from pathlib import Path

import pytest

from benchmarks.probe import write_plugin
from tests.vllm import stub

# Runs in the engine's process: returns the files of the functions that would be called, and the
# length of the record.
_DRIVE = """
import glob, os, socket
from pathlib import Path
from connector_tax.vllm.step_records import ask_to_write
children = getattr(scheduler.connector, "_connectors", ())

def callables():
    yield engine.step_fn
    yield from (scheduler.schedule, scheduler.update_from_output)
    yield from (worker.execute_model, worker.worker.sample_tokens)
    for connector in (scheduler.connector, *children, worker.worker.connector):
        yield from (connector.build_connector_meta, connector.start_load_kv)

def state():
    files = sorted({os.path.basename(f.__code__.co_filename) for f in callables()})
    ask_to_write(Path(LOG + ".scheduler.steps"))
    return files, os.path.getsize(LOG + ".scheduler.steps")

def turn(order):
    peer.sendall(order)
    assert peer.recv(1) == order
    return state()

def steps():
    for _ in range(5):
        engine.step_fn()

scheduler.add("b", 250)
steps()
peer = socket.socket(socket.AF_UNIX)
peer.connect(*glob.glob(LOG + ".*.switch"))
seen = []
for order in (b"0", b"0", b"1", b"1", b"0"):
    seen.append(turn(order))
    steps()
print("seen", json.dumps(seen))
"""


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("connector", ["One", "MultiConnector"])
def test_probe_restores_the_engine_when_off_and_records_when_on_again(
    tmp_path: Path, connector: str, asynchronous: bool
) -> None:
    tree, log = stub.write(tmp_path / "site"), tmp_path / "log"
    write_plugin(tmp_path / "plugin")
    output = stub.drive(
        tree,
        tmp_path / "plugin",
        log,
        connector=connector,
        asynchronous=asynchronous,
        before=f"LOG = {str(log)!r}\n{_DRIVE}",
    )
    seen = json.loads(next(x for x in output.splitlines() if x.startswith("seen"))[5:])
    assert [files == ["probe.py"] for files, _ in seen] == [False, False, True, True, False]
    assert ["probe.py" in files for files, _ in seen] == [False, False, True, True, False]
    out, still_out, back, still_in, out_again = (end for _, end in seen)
    assert 0 < out == still_out == back < still_in < out_again
    assert "switched off" not in output
