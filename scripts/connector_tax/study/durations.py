"""Estimate the duration of a study before it is measured, for plan, doctor, progress and `ab`.

A server that keeps up with a rate answers all of a cell's requests while they arrive. Where the
study names an accelerator, a roofline says from which rate on the server cannot keep up, as a fluid
model: of n requests in the server one is prefilled in k steps of the token budget, and decodes its
other tokens beside the rest; a second of a server that keeps up has room for all steps of the
requests that arrive in it. Without an accelerator every server is taken to keep up. A rehearsal
serves each request of a study in virtual time instead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from connector_tax.artifacts.names import REFERENCE_OF
from connector_tax.artifacts.study_file import cell_rates
from connector_tax.artifacts.study_records import CellSection, StudyDocument
from connector_tax.config import shipped
from connector_tax.roofline import Roofline, read_accelerator, read_model
from connector_tax.servers.kinds import engine_of
from connector_tax.vllm.device_time.clock import Batch

# vLLM's where its flags do not say: requests that run at once, and tokens of a step.
VLLM_SEQUENCES = 256
VLLM_STEP_TOKENS = 8192
# A phase's rate is the highest that takes less than this share of what the server can do.
UNSATURATED = 0.9


@dataclass(frozen=True)
class Durations:
    """Expected seconds.

    Attributes:
        startup_s: from a launch to a server that answers.
        probes_s: all probes of shapes together, without their server's start.
        source: sentence on the model, or on what was assumed and why.
        server: model of the server; None without an accelerator, where it is taken to keep up.
        rates_rps: expected reference rate of Phases B and B'; without an accelerator empty.
    """

    startup_s: float
    probes_s: float
    source: str
    server: "Server | None" = None
    rates_rps: Mapping[str, float] = field(default_factory=dict)

    def cell_s(self, cell: CellSection, rate_rps: float | None, shape: tuple[int, int]) -> float:
        """Return the expected seconds of a cell; an unknown rate counts as its shortest window."""
        if self.server is None or rate_rps is None:
            return expected_cell_s(cell, rate_rps)
        return self.server.cell_s(cell, rate_rps, shape)


@dataclass(frozen=True)
class Server:
    """A vLLM on an accelerator, as a fluid model.

    Attributes:
        roof: the cost of a step.
        step_tokens, sequences: the scheduler's bounds.
        kv_tokens: room of the KV cache.
    """

    roof: Roofline
    step_tokens: int
    sequences: int
    kv_tokens: int

    def request_s(self, shape: tuple[int, int], n: int) -> float:
        """Return the server's time for one request, n being served at once."""
        prompt, output = shape
        steps = math.ceil(prompt / self.step_tokens)
        chunk, held = prompt // steps, n * (prompt + output // 2)
        prefill_s = self._step_s(Batch(chunk, n, held, chunk * prompt // 2))
        return steps * prefill_s + max(0.0, output / n - steps) * self._step_s(Batch(0, n, held, 0))

    def _step_s(self, batch: Batch) -> float:
        return max(self.roof.efficiency["host_us"], self.roof.device_us(batch)) / 1e6

    def most_at_once(self, shape: tuple[int, int]) -> int:
        """Return how many requests fit the KV cache and the scheduler."""
        return max(1, min(self.sequences, self.kv_tokens // sum(shape)))

    def capacity_rps(self, shape: tuple[int, int]) -> float:
        """Return the most requests/s that are served."""
        return 1 / self.request_s(shape, self.most_at_once(shape))

    def life_s(self, shape: tuple[int, int], rate_rps: float) -> float:
        """Return how long a request takes at a rate below the capacity (Little's law)."""
        for n in range(1, self.most_at_once(shape) + 1):
            if rate_rps * self.request_s(shape, n) <= 1:
                return max(n / rate_rps if n > 1 else 0.0, self.request_s(shape, 1))
        return self.most_at_once(shape) / self.capacity_rps(shape)

    def cell_s(self, cell: CellSection, rate_rps: float, shape: tuple[int, int]) -> float:
        """Return warm-up, window and drain; a queue that grows lengthens the last two."""
        capacity_rps, life_s = self.capacity_rps(shape), self.life_s(shape, rate_rps)
        longest_s = min(cell["drain_s"], cell["request_timeout_s"])
        if rate_rps <= capacity_rps:
            return expected_cell_s(cell, rate_rps) + min(life_s, longest_s)
        grows = rate_rps / capacity_rps - 1
        window_s = cell["min_completed"] / capacity_rps + grows * cell["warmup_s"] + life_s
        window_s = min(max(cell["floor_s"], window_s), cell["cap_s"])
        queue_s = min(
            grows * (cell["warmup_s"] + window_s),
            (cell["inflight_cap"] or math.inf) / capacity_rps,
        )
        return cell["warmup_s"] + window_s + min(queue_s + life_s, longest_s)


def expected_cell_s(cell: CellSection, rate_rps: float | None) -> float:
    """Return the seconds of a cell of a server that keeps up: warm-up, and the window.

    The window is max(floor, time to the successes wanted), at most the cap; an unknown rate counts
    as the floor.
    """
    window = cell["floor_s"]
    if rate_rps is not None:
        window = min(max(window, cell["min_completed"] / rate_rps), cell["cap_s"])
    return float(cell["warmup_s"] + window)


def durations_of(study: StudyDocument) -> Durations:
    """Return the expected durations of a study.

    Raises:
        ConfigError: the accelerator or the model that it names cannot be had; names the key.
    """
    config = study["config"]
    engine, names = config["engine"], config.get("rehearsal") or {}
    kind = engine_of(engine)
    shape_rates = config.get("shape_rates")
    shapes = {c["cell"] for phase in ("B", "Bp") for c in study["cells"][phase]}
    probes_s = len(shapes) * shape_rates["probe_s"] if shape_rates else 0.0
    if kind.emulated or "accelerator" not in names:
        why = "no model of this machine" if kind.emulated else "no accelerator in `rehearsal`"
        how = "assumed" if engine.get("device") == "cuda" else "as in the shipped studies"
        source = f"if the server keeps up with every rate; start-up of {kind.startup_s:g} s {how}"
        return Durations(kind.startup_s, probes_s, f"{source}; {why}")
    flags, emulated = engine["flags"], engine["device"] == "emulated"
    accelerator, reached = read_accelerator(names["accelerator"])
    if emulated:
        reached = {**reached, "besides_us": engine["device_time"]["besides_us"]}
    gpus = int(flags.get("--tensor-parallel-size", 1))
    roof = Roofline(read_model(shipped(names["model_config"])), accelerator, reached, gpus)
    server = Server(
        roof,
        int(flags.get("--max-num-batched-tokens", VLLM_STEP_TOKENS)),
        int(flags.get("--max-num-seqs", VLLM_SEQUENCES)),
        roof.kv_tokens(flags),
    )
    source = f"by a fluid model of {names['accelerator']}"
    rates = _reference_rates(study, server)
    if not rates:
        source += ", which finds no reference rate"
    startup_s = kind.startup_s if emulated else roof.startup_s
    return Durations(startup_s, probes_s, source, server, rates)


def _reference_rates(study: StudyDocument, server: Server) -> dict[str, float]:
    """Return the highest rate of Phase A that the server keeps up with, for Phases B and B'."""
    served = [
        rate
        for cell in study["cells"]["A"]
        if (rate := cell["rate_rps"]) is not None
        and rate < UNSATURATED * server.capacity_rps((cell["input_tokens"], cell["output_tokens"]))
    ]
    return dict.fromkeys(REFERENCE_OF, max(served)) if served else {}


def expected_rates(
    study: StudyDocument,
    phase: str,
    reference_rps: float | None,
    known: Durations,
    limits: Mapping[str, float],
) -> dict[str, float | None]:
    """Return the rates of a phase's cells by name: measured, or expected; None where neither is.

    Args:
        reference_rps: the phase's reference rate, where it is known.
        limits: most requests/s of each cell's shape; empty before they were probed.
    """
    shape_rates = study["config"].get("shape_rates")
    if not limits and shape_rates is not None and known.server is not None:
        share = shape_rates["max_share"]
        limits = {
            cell["cell"]: share
            * known.server.capacity_rps((cell["input_tokens"], cell["output_tokens"]))
            for cell in study["cells"][phase]
        }
    return cell_rates(study, phase, reference_rps or known.rates_rps.get(phase), limits)


def overloaded_cells(study: StudyDocument, known: Durations) -> list[str]:
    """Return the cells, as "A r32", whose rate is above what the server is expected to do."""
    if known.server is None:
        return []
    return [
        f"{phase} {cell['cell']}"
        for phase, cells in study["cells"].items()
        for cell in cells
        if (rate := expected_rates(study, phase, None, known, {})[cell["cell"]]) is not None
        and rate > known.server.capacity_rps((cell["input_tokens"], cell["output_tokens"]))
    ]


def gates_s(study: StudyDocument, startup_s: float) -> float:
    """Return the expected seconds of all gates."""
    engine = engine_of(study["config"]["engine"])
    gates = sum(engine.gate_of(entry) is not None for entry in study["configurations"])
    return float(gates * (startup_s + engine.gate_s))


def probing_s(study: StudyDocument, startup_s: float, probes_s: float) -> float:
    """Return the expected seconds of the stage that probes the shapes; 0 in a study without it."""
    if study["config"].get("shape_rates") is None:
        return 0.0
    return startup_s + engine_of(study["config"]["engine"]).gate_s + probes_s
