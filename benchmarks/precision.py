"""What precision-targeted cells save: Phase A in full and precision-targeted, over several seeds.

The embedded engine's scheduler and cost model serve the study's own schedules; cells end by the
load generator's own rule; saturation, reference rates and taxes come from the analysis. Nothing is
sent and nobody waits: a clock is advanced from step to step. The seconds are the study's, from the
first arrival of a cell to its last token, and are therefore the same on every machine.

A verdict of three launches is itself a matter of chance where a tax is near the margin or near what
three launches can tell from nothing, so a grid that is repeated in full with another seed does not
give all its verdicts again either. That repetition is the yardstick: the precision-targeted grid
must agree with a full grid of another seed as often as a full grid does. Both are also held against
the true tax, which the cost model knows.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import run_alone
from benchmarks.precision_report import FULL, Replication, Truth, Verdicts, report
from connector_tax.analysis.aggregate import sample_cells
from connector_tax.analysis.effects import TaxTable
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.overload import overloads
from connector_tax.analysis.reference import NoReferenceRateError, judge_launches, reference_rates
from connector_tax.analysis.samples import METRICS as EFFECTS
from connector_tax.analysis.saturation import CellLoad, load_of
from connector_tax.analysis.taxes import Tables, tax_rows
from connector_tax.artifacts.names import REFERENCES, CellKey, Launch, plain_names
from connector_tax.artifacts.stage_records import RatesRecord
from connector_tax.artifacts.study_file import Study, launches
from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.config import ConfigError, load_yaml
from connector_tax.engine.config import EngineConfig, load_config
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen import Plan, make_offsets, open_loop
from connector_tax.rehearsal.cell import REQUEST, VirtualCell
from connector_tax.servers.embedded import launch_seed
from connector_tax.study.cell import cell_rule
from connector_tax.study.design import cell_order, resolve
from connector_tax.study.durations import assumed
from connector_tax.study.plan import launch_overhead_s
from connector_tax.study.precision import precision_rule, saturation_skips

METRICS = ("ttft_p90", "tpot_p90")


def measured(cell: VirtualCell) -> Requests:
    """The measured arrivals of a cell, as the analysis reads them."""
    start_ns, stop_ns = cell.plan.warmup_end_ns, cell.plan.stop_ns
    assert stop_ns is not None
    arrived = [record for record in cell.plan.requests() if record.measured]
    ok = [record for record in arrived if record.status == "ok"]
    due, first, last = (
        np.array([getattr(record, name) for record in ok], dtype=np.float64)
        for name in ("t_intended_ns", "t_first_token_ns", "t_last_token_ns")
    )
    return Requests(
        ttft_ms=(first - due) / 1e6,
        ttft_from_send_ms=(first - due) / 1e6,
        tpot_ms=(last - first) / (cell.shape[1] - 1) / 1e6,
        e2e_ms=(last - due) / 1e6,
        since_warmup_s=(due - start_ns) / 1e9,
        window_s=(stop_ns - start_ns) / 1e9,
        arrivals=len(arrived),
        failed=0,
        dropped=len(arrived) - len(ok),
    )


def load_seen(cell: VirtualCell) -> CellLoad | None:
    """What saturation is judged from."""
    stop_ns = cell.plan.stop_ns or 0
    seen = [s.waiting for s in cell.scrapes if cell.plan.warmup_end_ns <= s.t_ns < stop_ns]
    return load_of(measured(cell), float(np.median(seen)))


@dataclass
class Outcome:
    """A Phase A: its cells, what they measured, and the seconds each configuration took."""

    study: Study
    cells: list[Cell] = field(default_factory=list)
    loads: dict[CellKey, CellLoad] = field(default_factory=dict)
    requests: dict[CellKey, Requests] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self, definition: Path) -> None:
        """Simulate every launch."""
        for launch in launches(self.study.document, "A"):
            self._launch(launch, load_config(definition, launch.configuration))

    def _launch(self, launch: Launch, engine_config: EngineConfig) -> None:
        document, config = self.study.document, self.study.config
        engine = VirtualEngine(engine_config, launch_seed(document, launch))
        ratios: dict[float, float | None] = {}
        for planned in cell_order(document, launch):
            rate = planned["rate_rps"]
            assert rate is not None
            key = CellKey(launch.config, launch.block, "A", planned["cell"])
            skipped = config["precision"]["enabled"] and any(
                saturation_skips(config["precision"], lower, ratio, rate)
                for lower, ratio in ratios.items()
            )
            if not skipped:
                started_ns = engine.now_ns
                cell = virtual_cell(document, launch, planned)
                cell.serve(engine)
                requests, load = measured(cell), load_seen(cell)
                ratios[rate] = requests.throughput_ratio
                if load is not None:
                    self.loads[key] = load
                self.requests[key] = requests
                took_s = (engine.now_ns - started_ns) / 1e9
                self.seconds[launch.config] = self.seconds.get(launch.config, 0.0) + took_s
            status, reason = ("skipped", "saturated") if skipped else ("valid", None)
            self.cells.append(
                Cell(
                    key, launch.configuration, status, reason, Path(), {}, None, rate,
                    planned["input_tokens"], planned["output_tokens"],
                )
            )  # fmt: skip

    def verdicts(self) -> tuple[RatesRecord, Verdicts]:
        """reference_rates.json, and the verdict of each tax at a reference rate.

        Raises:
            NoReferenceRateError: no rate qualifies.
        """
        sweeps = judge_launches(self.study, self.cells, self.loads)
        rates = reference_rates(self.study, self.cells, sweeps)
        dropped = {key: requests.dropped for key, requests in self.requests.items()}
        overloaded = overloads(self.study, self.cells, self.loads, dropped, sweeps)
        samples = sample_cells(self.study, self.requests)
        taxes = TaxTable(self.study, self.cells, samples, overloaded)
        verdicts: Verdicts = {
            (row["config"], name, row["metric"]): str(row["verdict"])
            for row in tax_rows(Tables(self.study, taxes, rates, {}))
            for name in REFERENCES[: 1 if rates["ref_safe"] == rates["ref_load"] else 2]
            if row["phase"] == "A" and row["rate_rps"] == rates[name] and row["metric"] in METRICS
        }
        return rates, verdicts


def virtual_cell(study: StudyDocument, launch: Launch, planned: Mapping[str, Any]) -> VirtualCell:
    """A cell with the schedule and the rule it has in the study."""
    config = study["config"]
    rule = cell_rule(config, "A")
    offsets = make_offsets(
        config["arrivals"]["process"],
        planned["rate_rps"],
        rule.schedule_s,
        f"{study['seed']}/arrivals/block{launch.block}/A/{planned['cell']}",
        gamma_shape=config["arrivals"]["gamma_shape"],
    )
    load = open_loop(offsets, [REQUEST] * len(offsets), rule)
    plan = Plan(load, rule, precision_rule(config))
    return VirtualCell(
        plan,
        rule,
        (planned["input_tokens"], planned["output_tokens"]),
        round(config["metrics"]["interval_s"] * 1e9),
    )


def simulate(config: Mapping[str, Any], source: str, definition: Path, enabled: bool) -> Outcome:
    """Phase A with precision-targeted cells or without.

    Raises:
        ConfigError: the configuration is unusable.
    """
    changed = {**config, "precision": {**config["precision"], "enabled": enabled}}
    outcome = Outcome(Study(Path(), resolve(changed, source)))
    outcome.run(definition)
    return outcome


def true_taxes(
    config: Mapping[str, Any], source: str, definition: Path, rate_rps: float, launches: int
) -> dict[tuple[str, str], Truth]:
    """(configuration, metric) to its true tax in the full grid's cell at a rate.

    As in `calibration.truth`: the mean over launches of the log ratio to plain, every configuration
    of a launch with the same arrivals, launch offset and jitter. Closing plain's is 0.

    Args:
        config: of the study; its seed names the random streams.
        source: the configuration file's name, for errors.
        definition: the engine's file.
        rate_rps: one of `phase_a.rates_rps`.
        launches: at least 2.
    """
    without = {**config["precision"], "enabled": False}
    document = resolve({**config, "precision": without, "blocks": launches}, source)
    (planned,) = (c for c in document["cells"]["A"] if c["rate_rps"] == rate_rps)
    logs: dict[tuple[str, str], list[float]] = {}
    for block in range(launches):
        seed = launch_seed(document, Launch("truth", block, "A"))
        for name in config["configurations"]:
            cell = virtual_cell(document, Launch(name, block, "A"), planned)
            cell.serve(VirtualEngine(load_config(definition, name), seed))
            requests = measured(cell)
            for metric in METRICS:
                column, percent = EFFECTS[metric]
                log = float(np.log(np.percentile(getattr(requests, column), percent)))
                logs.setdefault((name, metric), []).append(log)
    taxes = {(plain_names(2)[-1], metric): Truth(0.0, 0.0) for metric in METRICS}
    for (name, metric), own in logs.items():
        if name != "plain":
            ratios = np.array(own) - np.array(logs["plain", metric])
            tax = float(np.expm1(ratios.mean()))
            error = float(np.std(ratios, ddof=1) / np.sqrt(launches))
            taxes[name, metric] = Truth(tax, (1 + tax) * error)
    return taxes


def replicate(config: Mapping[str, Any], source: str, definition: Path) -> Replication:
    """Both grids with the same seed.

    Raises:
        ConfigError: the configuration is unusable.
        NoReferenceRateError: no rate qualifies.
    """
    outcomes = [simulate(config, source, definition, enabled) for enabled in (False, True)]
    (full_rates, full), (precise_rates, precise) = (o.verdicts() for o in outcomes)
    document = outcomes[FULL].study.document
    known = assumed(document, "a benchmark")
    around_s = launch_overhead_s(document, outcomes[FULL].study.root, known)
    full_s, precise_s = (sum(o.seconds.values()) for o in outcomes)
    return Replication(
        (full, precise),
        (full_rates, precise_rates),
        (full_s, precise_s),
        around_s * len(document["run_order"]["A"]),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate Phase A in full and with precision-targeted cells over several seeds; compare the
    time, the verdicts with each other and with the cost model's own taxes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.precision", description=main.__doc__
    )
    parser.add_argument("--config", type=Path, default=Path("config/h20.yaml"))
    parser.add_argument("--definition", type=Path, default=Path("config/embedded.yaml"))
    parser.add_argument("--blocks", type=int, default=3, help="verdicts need 3 (default)")
    parser.add_argument("--seeds", type=int, default=6, help="studies of each kind, at least 3")
    parser.add_argument(
        "--truth-launches", type=int, default=30, help="launches behind a true tax, at least 2"
    )
    parser.add_argument("--configurations", nargs="+", help="default: the configuration file's")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 3:
        parser.error(f"argument --seeds: found {arguments.seeds}; allowed: at least 3")
    if arguments.truth_launches < 2:
        parser.error(
            f"argument --truth-launches: found {arguments.truth_launches}; allowed: at least 2"
        )
    # Plain's second launch is the one tax that is known to be zero.
    config = load_yaml(arguments.config) | {"blocks": arguments.blocks, "plain_launches": 2}
    config.pop("shape_rates", None)  # shapes are of Phase B, which is not simulated
    if arguments.configurations:
        config["configurations"] = arguments.configurations
        kept = [c for c in config["phase_bp"]["configurations"] if c in arguments.configurations]
        config["phase_bp"]["configurations"] = kept
    source, definition = str(arguments.config), arguments.definition
    replications = []
    try:
        for number in range(arguments.seeds):
            started = time.monotonic()
            seeded = config | {"seed": config["seed"] + number}
            replications.append(replicate(seeded, source, definition))
            print(
                f"seed {number + 1} of {arguments.seeds}: simulated in "
                f"{time.monotonic() - started:.0f} s",
                file=sys.stderr,
            )
        references = {
            rates[name]
            for replication in replications
            for rates in replication.rates
            for name in ("ref_safe", "ref_load")
        }
        # A seed of its own: the truth shares no random number with the studies it judges.
        aside = config | {"seed": config["seed"] + arguments.seeds}
        truths = {
            rate: true_taxes(aside, source, definition, rate, arguments.truth_launches)
            for rate in references
        }
    except (ConfigError, NoReferenceRateError) as error:
        print(error, file=sys.stderr)
        return 2
    statistics = config["statistics"]
    return int(not report(replications, truths, statistics["margins"], statistics["confidence"]))


if __name__ == "__main__":
    sys.exit(run_alone(main))
