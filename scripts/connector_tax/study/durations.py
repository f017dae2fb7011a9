"""Estimate the duration of a study before it is measured, for plan, doctor, progress and `ab`.

A server that sustains a rate answers all of a cell's requests while they arrive. If the study names
an accelerator, a fluid model with a roofline gives the rate above which the server cannot sustain
the load. In the model, each of n requests is prefilled in k steps of the token budget, and decodes
its other tokens beside the others; a sustained second has room for all steps of the requests that
arrive in it. Without an accelerator every rate counts as sustained. A rehearsal, by contrast,
serves each request of a study in virtual time.
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

# vLLM's defaults without flags: requests that run at once, and tokens per step.
VLLM_SEQUENCES = 256
VLLM_STEP_TOKENS = 8192
# A reference rate is the highest below this share of the server's capacity.
UNSATURATED = 0.9


@dataclass(frozen=True)
class Durations:
    """Expected durations in s.

    Attributes:
        startup_s: from a launch to a server that answers.
        probes_s: all probes of shapes together, without their server's start.
        source: a sentence on the model, or on the assumptions and their reason.
        server: model of the server; None without an accelerator, where every rate is sustained.
        rates_rps: expected reference rates of Phases B and B'; empty without an accelerator.
    """

    startup_s: float
    probes_s: float
    source: str
    server: "Server | None" = None
    rates_rps: Mapping[str, float] = field(default_factory=dict)

    def cell_s(self, cell: CellSection, rate_rps: float | None, shape: tuple[int, int]) -> float:
        """Return the expected seconds of a cell; an unknown rate gives its shortest window."""
        if self.server is None or rate_rps is None:
            return expected_cell_s(cell, rate_rps)
        return self.server.cell_s(cell, rate_rps, shape)


@dataclass(frozen=True)
class Server:
    """A fluid model of a vLLM on an accelerator.

    Attributes:
        roof: the cost of a step.
        step_tokens, sequences: the scheduler's limits per step.
        kv_tokens: capacity of the KV cache in tokens.
    """

    roof: Roofline
    step_tokens: int
    sequences: int
    kv_tokens: int

    def request_s(self, shape: tuple[int, int], n: int) -> float:
        """Return the server time in s that a request takes while n requests are served."""
        prompt, output = shape
        steps = math.ceil(prompt / self.step_tokens)
        chunk, cached_tokens = prompt // steps, n * (prompt + output // 2)
        prefill_s = self._step_s(Batch(chunk, n, cached_tokens, chunk * prompt // 2))
        return steps * prefill_s + max(0.0, output / n - steps) * self._step_s(
            Batch(0, n, cached_tokens, 0)
        )

    def _step_s(self, batch: Batch) -> float:
        return max(self.roof.efficiency["host_us"], self.roof.device_us(batch)) / 1e6

    def most_at_once(self, shape: tuple[int, int]) -> int:
        """Return the number of requests that the KV cache and the scheduler hold at once."""
        return max(1, min(self.sequences, self.kv_tokens // sum(shape)))

    def capacity_rps(self, shape: tuple[int, int]) -> float:
        """Return the highest throughput in requests/s."""
        return 1 / self.request_s(shape, self.most_at_once(shape))

    def life_s(self, shape: tuple[int, int], rate_rps: float) -> float:
        """Return the duration in s of one request at a rate below the capacity (Little's law)."""
        for n in range(1, self.most_at_once(shape) + 1):
            if rate_rps * self.request_s(shape, n) <= 1:
                return max(n / rate_rps if n > 1 else 0.0, self.request_s(shape, 1))
        return self.most_at_once(shape) / self.capacity_rps(shape)

    def cell_s(self, cell: CellSection, rate_rps: float, shape: tuple[int, int]) -> float:
        """Return the seconds of warm-up, window and drain; a growing queue prolongs both."""
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
    """Return the seconds of a cell at a sustained rate: warm-up plus window.

    The window is max(floor, time to the required successes), at most the cap; an unknown rate gives
    the floor.
    """
    window = cell["floor_s"]
    if rate_rps is not None:
        window = min(max(window, cell["min_completed"] / rate_rps), cell["cap_s"])
    return float(cell["warmup_s"] + window)


def durations_of(study: StudyDocument) -> Durations:
    """Return the expected durations of a study.

    Raises:
        ConfigError: the accelerator or its model is unknown; names the key.
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
    """Return the expected reference rate of Phases B and B', by phase."""
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
    """Return the measured or expected rate of each cell of a phase, by name; None if unknown.

    Args:
        limits: highest requests/s of each cell's shape; empty before they are probed.
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
    """Return the cells, as "A r32", whose rate is above the server's expected capacity."""
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
    """Return the expected seconds of probing the shapes; 0 for a study without this stage."""
    if study["config"].get("shape_rates") is None:
        return 0.0
    return startup_s + engine_of(study["config"]["engine"]).gate_s + probes_s
