"""What the step probe changes in a real vLLM's time per token, with and without it in one launch.

Two launches of a server on a small machine differ by tens of per cent, and the speed of a virtual
machine's processors changes from minute to minute; the probe costs a few thousandths of a step.
So one server answers the same requests, one at a time, with the probe taken out and put back
between them (probe_switch): four requests make a block, on-off-off-on or
off-on-on-off in turn, so that a drift falls on both alike. A request's value is its mean time per
token after the first; a block's is the logarithm of the ratio of on to off; their mean without the
outer tenths stands with its bootstrap interval (95%, BCa). The speed of the processors changes
within tenths of a second too, so many short requests tell more than few long ones.
"""

import contextlib
import math
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from numpy.typing import ArrayLike
from scipy import stats

from connector_tax.artifacts.names import Launch
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.files import ArtifactError
from connector_tax.loadgen import PlannedRequest, RequestSource
from connector_tax.machine import cpu
from connector_tax.servers.kinds import STEP_LOG_PREFIX, engine_of
from connector_tax.study.device import devices_of, hold_devices
from connector_tax.study.preflight import GateError, gated_server
from connector_tax.study.prompts import planned_requests
from connector_tax.vllm.step_probe.log import socket_address
from connector_tax.vllm.step_records import ProbeSocketError, ask_to_write

INPUT_TOKENS = 32
OUTPUT_TOKENS = 32
# After the switch the interpreter finds its way anew.
SETTLING_TOKENS = 4
# Asynchronous scheduling has a step under way when a request is answered.
IDLE_S = 0.03
_ENTRY_POINT = "connector_tax_probe_switch"


@dataclass(frozen=True, slots=True)
class Block:
    """Seconds per token of the requests with the probe in, and with it out."""

    on: tuple[float, ...]
    off: tuple[float, ...]

    @property
    def log_ratio(self) -> float:
        """log(on / off), of geometric means."""
        return statistics.fmean(map(math.log, self.on)) - statistics.fmean(map(math.log, self.off))


class _Switches:
    """The switch of every process of a server that runs steps."""

    def __init__(self, folder: Path, peers: Sequence[socket.socket]) -> None:
        self._log = folder / f"{STEP_LOG_PREFIX}.scheduler.steps"
        self._peers = peers
        self._recorded = 0
        self._on = True

    def turn(self, on: bool) -> None:
        """Put the probe in or take it out everywhere.

        Raises:
            GateError: a process ended, or the probe's record shows that it was not what it was to
                be since the last turn.
        """
        if on == self._on:
            return
        time.sleep(IDLE_S)
        order = b"1" if on else b"0"
        try:
            for peer in self._peers:
                peer.sendall(order)
                if peer.recv(1) != order:
                    raise GateError("the server ended while the probe was switched")
            ask_to_write(self._log)
        except (OSError, ProbeSocketError) as error:
            raise GateError(f"the probe cannot be switched: {error}") from error
        recorded = self._log.stat().st_size
        if (recorded > self._recorded) != self._on:
            raise GateError(
                f"the probe was {'in' if self._on else 'out'} and its record grew from "
                f"{self._recorded} to {recorded} bytes"
            )
        self._recorded, self._on = recorded, on


@contextlib.contextmanager
def _switches(folder: Path) -> Iterator[_Switches]:
    paths = sorted(folder.glob("*.switch"))
    if not paths:
        raise GateError(f"{folder}: no process of the server has a switch; see its log")
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in paths]
        for peer, path in zip(peers, paths, strict=True):
            peer.settimeout(10.0)
            with socket_address(str(path)) as address:
                peer.connect(address)
        yield _Switches(folder, peers)


def serving(
    study: StudyDocument, configurations: Sequence[str], launches: int, blocks: int
) -> None:
    """Print the ratio of the time per token with the probe to that without, by configuration.

    Args:
        configurations: ids of the study's.
        launches, blocks: of each configuration, and of each launch; 2 or more.

    Raises:
        ArtifactError: the study holds no such configuration.
        GateError: a server did not start, serve or stop as it must, or the probe did not record
            when it was in, or recorded when it was out.
        DeviceError: another study or benchmark measures on the device.
    """
    known = [entry["id"] for entry in study["configurations"]]
    for configuration in configurations:
        if configuration not in known:
            raise ArtifactError(f"{configuration}: not in the study, which has {', '.join(known)}")
    print(
        f"{cpu()}; {launches} launches of {blocks} blocks of four requests, one at a time, of "
        f"{INPUT_TOKENS} + {OUTPUT_TOKENS} tokens"
    )
    with (
        hold_devices(devices_of(study["config"])),
        tempfile.TemporaryDirectory() as text,
    ):
        folder = Path(text)
        write_plugin(folder / "plugin")
        for configuration in configurations:
            measured: list[Block] = []
            for number in range(launches):
                where = folder / f"{configuration}{number}"
                with (
                    gated_server(
                        study,
                        Launch(configuration, number, "A"),
                        "probe_serving",
                        where,
                        lambda _: None,
                        folder / "plugin",
                    ) as server,
                    _switches(where) as switches,
                ):
                    of_launch = _measure(study, server.url, switches, f"probe/{number}", blocks)
                print(f"{configuration}, launch {number + 1}: {_summary(of_launch)}")
                measured += of_launch
            print(f"{configuration}, all: {_summary(measured)}")


def write_plugin(folder: Path) -> None:
    """The switch, and the metadata by which vLLM finds it when `folder` is on the server's path."""
    metadata = folder / f"{_ENTRY_POINT}-1.0.dist-info"
    metadata.mkdir(parents=True)
    texts = {
        "METADATA": f"Metadata-Version: 2.1\nName: {_ENTRY_POINT}\nVersion: 1.0\n",
        "entry_points.txt": f"[vllm.general_plugins]\n{_ENTRY_POINT} = {_ENTRY_POINT}:register\n",
    }
    for name, text in texts.items():
        (metadata / name).write_text(text)
    shutil.copy(Path(__file__).with_name("probe_switch.py"), folder / f"{_ENTRY_POINT}.py")


def _summary(blocks: Sequence[Block]) -> str:
    ratios = [block.log_ratio for block in blocks]
    interval = stats.bootstrap((ratios,), _centre, rng=0).confidence_interval
    low, middle, high = (math.expm1(x) for x in (interval.low, _centre(ratios), interval.high))
    on = statistics.median(value for block in blocks for value in block.on) * 1000
    off = statistics.median(value for block in blocks for value in block.off) * 1000
    return (
        f"on {on:.3f} ms, off {off:.3f} ms per token; on over off in {len(blocks)} blocks "
        f"{middle:+.2%} [{low:+.2%}, {high:+.2%}]"
    )


def _centre(values: ArrayLike, axis: int = -1) -> Any:
    return stats.trim_mean(values, 0.1, axis=axis)


def _measure(
    study: StudyDocument, url: str, switches: _Switches, name: str, blocks: int
) -> list[Block]:
    settling = _requests(study, f"{name}/settling", SETTLING_TOKENS, 4 * blocks)
    requests = _requests(study, name, OUTPUT_TOKENS, 4 * blocks)
    pairs = zip(settling, requests, strict=True)
    headers = {"Content-Type": "application/json"}
    measured = []
    with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=60.0) as client:
        for number in range(blocks):
            outer = number % 2 == 0
            values: dict[bool, list[float]] = {True: [], False: []}
            for on in (outer, not outer, not outer, outer):
                switches.turn(on)
                first, request = next(pairs)
                _decoding_s(client, first)
                values[on].append(_decoding_s(client, request) / (OUTPUT_TOKENS - 1))
            measured.append(Block(tuple(values[True]), tuple(values[False])))
    return measured


def _requests(study: StudyDocument, name: str, tokens: int, count: int) -> RequestSource:
    return planned_requests(
        engine_of(study["config"]["engine"]).served,
        input_tokens=INPUT_TOKENS,
        output_tokens=tokens,
        count=count,
        seed=study["seed"],
        name=name,
    )


def _decoding_s(client: httpx.Client, request: PlannedRequest) -> float:
    """Seconds from the first token to the last."""
    with client.stream("POST", "/v1/completions", content=request.body) as answer:
        answer.raise_for_status()
        stamps = [time.perf_counter() for line in answer.iter_lines() if line]
    # The last two lines are the usage and [DONE].
    return stamps[-3] - stamps[0]
