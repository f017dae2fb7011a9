"""What precision-targeted cells save: Phase A of a study twice, in virtual time, verdicts compared.

The embedded engine's scheduler and cost model serve the study's own schedules; cells end by the
load generator's own rule; saturation, reference rates and taxes come from the analysis. Nothing is
sent and nobody waits: a clock is advanced from step to step. The seconds in the table are the
study's, from the first arrival of a cell to its last token, and are therefore the same on every
machine.
"""

import argparse
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from connector_tax.analysis.effects import TaxTable, sample_launch
from connector_tax.analysis.ingest import Cell, CellKey, Study
from connector_tax.analysis.measure import Requests
from connector_tax.analysis.reference import NoReferenceRateError, judge_launches, reference_rates
from connector_tax.analysis.saturation import Load, load_of
from connector_tax.analysis.taxes import Tables, tax_rows
from connector_tax.config import ConfigError, load_yaml
from connector_tax.engine.config import EngineConfig, load_config
from connector_tax.engine.model import StepClock
from connector_tax.engine.scheduler import Scheduler
from connector_tax.engine.scheduler import Sequence as Served
from connector_tax.loadgen import PlannedRequest, make_offsets
from connector_tax.loadgen.cell import OpenLoopCell
from connector_tax.loadgen.generator import PROGRESS_S
from connector_tax.loadgen.messages import Cancel, Done
from connector_tax.provenance.environment import cpu
from connector_tax.study.cell import cell_rule
from connector_tax.study.design import Launch, cell_order, launch_seed, launches, resolve
from connector_tax.study.plan import launch_overhead_s
from connector_tax.study.precision import precision_rule, saturation_skips

LEAD_NS = 20_000_000
LOOK_NS = round(PROGRESS_S * 1e9)
REQUEST = PlannedRequest("simulated", b"{}", None, None)
METRICS = ("ttft_p90", "tpot_p90")


class VirtualEngine:
    """One launch of the embedded engine on a clock of its own; `now_ns` is where it stands."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self._tax = config.tax
        self.scheduler = Scheduler(config.scheduler, config.model.max_model_len)
        self._clock = StepClock(config.step_cost, seed)
        self._block_size = config.scheduler.kv_block_size
        self._arrivals = 0
        self.now_ns = 0

    def add(self, seq: int, prompt: int, output: int) -> None:
        """A request arrives; no other shares a block of its prompt."""
        self._arrivals += 1
        blocks = range(prompt // self._block_size)
        digests = [b"%d/%d" % (self._arrivals, block) for block in blocks]
        self.scheduler.add(Served(self._arrivals, prompt, output, digests, seq))

    def step(self) -> list[Served]:
        """Run a step to its end; the requests that got a token."""
        plan = self.scheduler.plan()
        tax_us = 0.0
        if self._tax is not None:
            tax_us = self._tax.build_meta(self.scheduler.pool.cached, len(plan.admitted))
            tax_us += self._tax.get_finished_us + self._tax.start_load_kv_us
        shape = (plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens)
        self.now_ns += round((sum(self._clock.draw_us(*shape)) + tax_us) * 1000)
        return self.scheduler.commit(plan)


@dataclass
class VirtualCell:
    """A cell being served: the load generator's plan, and what the engine answered."""

    plan: OpenLoopCell
    shape: tuple[int, int]
    inflight_cap: int
    scrape_ns: int
    due: deque[tuple[int, int]] = field(default_factory=deque)
    due_ns: dict[int, int] = field(default_factory=dict)
    first_ns: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    inflight: int = 0
    wake_ns: int | None = 0

    def serve(self, engine: VirtualEngine) -> None:
        """Run the cell until it is drained."""
        origin_ns = engine.now_ns
        self.plan.start(origin_ns)
        look_ns = scrape_ns = self.wake_ns = origin_ns
        while self.wake_ns is not None or self.due or engine.scheduler.has_work:
            if not engine.scheduler.has_work:
                events = [self.due[0][0]] if self.due else []
                events += [self.wake_ns] if self.wake_ns is not None else []
                engine.now_ns = max(engine.now_ns, min(events))
            while look_ns <= engine.now_ns:
                self.plan.look()
                look_ns += LOOK_NS
            while scrape_ns <= engine.now_ns:
                self.waiting.append((scrape_ns, len(engine.scheduler.waiting)))
                scrape_ns += self.scrape_ns
            self._issue(engine.now_ns)
            self._arrive(engine)
            if engine.scheduler.has_work:
                self._answer(engine.step(), engine.now_ns)

    def _issue(self, now_ns: int) -> None:
        if self.wake_ns is None or self.wake_ns > now_ns:
            return
        items, next_ns = self.plan.step(now_ns, now_ns + LEAD_NS)
        for item in items:
            assert not isinstance(item, Cancel)
            self.due.append((item[0].due_ns, item[0].seq))
            self.due_ns[item[0].seq] = item[0].due_ns
        self.wake_ns = None if next_ns is None else max(now_ns + 1, next_ns - LEAD_NS)

    def _arrive(self, engine: VirtualEngine) -> None:
        while self.due and self.due[0][0] <= engine.now_ns:
            _, seq = self.due.popleft()
            if self.inflight >= self.inflight_cap:
                self.plan.take(Done(0, 0, seq, "inflight_cap"))
                continue
            self.inflight += 1
            engine.add(seq, *self.shape)

    def _answer(self, emitted: Sequence[Served], now_ns: int) -> None:
        for served in emitted:
            seq = served.sink
            self.first_ns.setdefault(seq, now_ns)
            if served.finished:
                self.last_ns[seq] = now_ns
                self.inflight -= 1
                self.plan.take(
                    Done(
                        0, 0, seq, t_first_token_ns=self.first_ns[seq], t_last_token_ns=now_ns,
                        t_done_ns=now_ns, completion_tokens=served.output_len,
                    )
                )  # fmt: skip

    def requests(self) -> Requests:
        """The measured arrivals, as the analysis reads them."""
        start_ns, stop_ns = self.plan.warmup_end_ns, self.plan.stop_ns
        assert stop_ns is not None
        arrived = [s for s, due in self.due_ns.items() if start_ns <= due < stop_ns]
        ok = [seq for seq in arrived if seq in self.last_ns]
        due, first, last = (
            np.array([stamps[seq] for seq in ok], dtype=np.float64)
            for stamps in (self.due_ns, self.first_ns, self.last_ns)
        )
        return Requests(
            ttft_ms=(first - due) / 1e6,
            ttft_from_send_ms=(first - due) / 1e6,
            tpot_ms=(last - first) / (self.shape[1] - 1) / 1e6,
            e2e_ms=(last - due) / 1e6,
            since_warmup_s=(due - start_ns) / 1e9,
            window_s=(stop_ns - start_ns) / 1e9,
            arrivals=len(arrived),
            failed=0,
            dropped=len(arrived) - len(ok),
        )

    def load(self) -> Load | None:
        """What saturation is judged from."""
        stop_ns = self.plan.stop_ns or 0
        depths = [n for t, n in self.waiting if self.plan.warmup_end_ns <= t < stop_ns]
        return load_of(self.requests(), float(np.median(depths)))


@dataclass
class Outcome:
    """A Phase A: its cells, what they measured, and the seconds each configuration took."""

    study: Study
    cells: list[Cell] = field(default_factory=list)
    loads: dict[CellKey, Load] = field(default_factory=dict)
    samples: dict[CellKey, Any] = field(default_factory=dict)
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
            key = CellKey(launch.config, launch.block, "A", planned["cell"])
            skipped = config["precision"]["enabled"] and any(
                saturation_skips(config["precision"], lower, ratio, rate)
                for lower, ratio in ratios.items()
            )
            if not skipped:
                started_ns = engine.now_ns
                cell = virtual_cell(document, launch, planned)
                cell.serve(engine)
                requests, load = cell.requests(), cell.load()
                ratios[rate] = requests.throughput_ratio
                if load is not None:
                    self.loads[key] = load
                self.samples[key] = sample_launch(
                    requests, config["statistics"], document["seed"], key
                )
                took_s = (engine.now_ns - started_ns) / 1e9
                self.seconds[launch.config] = self.seconds.get(launch.config, 0.0) + took_s
            status, reason = ("skipped", "saturated") if skipped else ("valid", None)
            self.cells.append(
                Cell(
                    key, launch.configuration, status, reason, Path(), {}, None, rate,
                    planned["input_tokens"], planned["output_tokens"],
                )
            )  # fmt: skip

    def verdicts(self) -> tuple[dict[str, Any], dict[tuple[str, str, str], str]]:
        """reference_rates.json, and the verdict of each (config, reference, metric).

        Raises:
            NoReferenceRateError: no rate qualifies.
        """
        sweeps = judge_launches(self.study, self.cells, self.loads)
        rates = reference_rates(self.study, self.cells, sweeps)
        taxes = TaxTable(self.study, self.cells, self.samples)
        found = {
            (row["config"], name, row["metric"]): str(row["verdict"])
            for row in tax_rows(Tables(self.study, taxes, rates, {}))
            for name in ("ref_safe", "ref_load")[
                : 1 if rates["ref_safe"] == rates["ref_load"] else 2
            ]
            if row["phase"] == "A" and row["rate_rps"] == rates[name] and row["metric"] in METRICS
        }
        return rates, found


def virtual_cell(
    study: Mapping[str, Any], launch: Launch, planned: Mapping[str, Any]
) -> VirtualCell:
    """A cell with the schedule and the rule it has in the study."""
    config = study["config"]
    offsets = make_offsets(
        config["arrivals"]["process"],
        planned["rate_rps"],
        config["cell"]["warmup_s"] + config["cell"]["cap_s"],
        f"{study['seed']}/arrivals/block{launch.block}/A/{planned['cell']}",
        gamma_shape=config["arrivals"]["gamma_shape"],
    )
    plan = OpenLoopCell(
        offsets, [REQUEST] * len(offsets), cell_rule(config), precision_rule(config)
    )
    return VirtualCell(
        plan,
        (planned["input_tokens"], planned["output_tokens"]),
        config["cell"]["inflight_cap"],
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


def compare(full: Outcome, precise: Outcome) -> bool:
    """Print the table; whether all verdicts agree and the time is at most halved."""
    (rates, verdicts), (precise_rates, precise_verdicts) = full.verdicts(), precise.verdicts()
    table = Table(title=f"{cpu()}; times are virtual, full grid | precision-targeted")
    for name in ("configuration", "cell time (s)", "cells", "saturated from (req/s)"):
        table.add_column(name)
    columns = sorted({key[1:] for key in verdicts}, reverse=True)
    for reference, metric in columns:
        table.add_column(f"{metric} at {reference}")
    same = [rates[r] == precise_rates[r] for r in ("ref_safe", "ref_load")]
    for config in full.seconds:
        knees = [r["saturation_rate_rps"].get(config) for r in (rates, precise_rates)]
        same.append(knees[0] == knees[1])
        row = [f"{full.seconds[config]:.0f} | {precise.seconds[config]:.0f}"]
        row.append(" | ".join(str(_measured(o, config)) for o in (full, precise)))
        row.append(" | ".join("none" if k is None else f"{k:g}" for k in knees))
        for column in columns:
            pair = [v.get((config, *column), "") for v in (verdicts, precise_verdicts)]
            same.append(pair[0] == pair[1])
            row.append(pair[0] if same[-1] else " | ".join(pair))
        table.add_row(config, *row)
    Console(width=200).print(table)
    total, short = (sum(outcome.seconds.values()) for outcome in (full, precise))
    for name in ("ref_safe", "ref_load"):
        print(f"{name}: {rates[name]:g} | {precise_rates[name]:g} req/s")
    document = full.study.document
    around = launch_overhead_s(document, full.study.root) * len(document["run_order"]["A"])
    print(
        f"{same.count(True)} of {len(same)} reference rates, saturation rates and verdicts agree; "
        f"{short:.0f} s of {total:.0f} s in cells: {short / total:.0%} (bound 50%); with "
        f"{around:.0f} s of start-up and release {(short + around) / (total + around):.0%}"
    )
    return all(same) and short <= total / 2


def _measured(outcome: Outcome, config: str) -> int:
    return sum(c.key.config == config and c.status == "valid" for c in outcome.cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate Phase A in full and with precision-targeted cells; compare verdicts and time."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.study.bench_precision", description=main.__doc__
    )
    parser.add_argument("--config", type=Path, default=Path("config/h20.yaml"))
    parser.add_argument("--definition", type=Path, default=Path("config/embedded.yaml"))
    parser.add_argument("--blocks", type=int, default=3, help="verdicts need 3 (default)")
    parser.add_argument("--configurations", nargs="+", help="default: the configuration file's")
    arguments = parser.parse_args(argv)
    try:
        config = load_yaml(arguments.config) | {"blocks": arguments.blocks}
        if arguments.configurations:
            config["configurations"] = arguments.configurations
            kept = [
                c for c in config["phase_bp"]["configurations"] if c in arguments.configurations
            ]
            config["phase_bp"]["configurations"] = kept
        started = time.monotonic()
        source = str(arguments.config)
        full, precise = (
            simulate(config, source, arguments.definition, enabled) for enabled in (False, True)
        )
        agree = compare(full, precise)
    except (ConfigError, NoReferenceRateError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"simulated in {time.monotonic() - started:.0f} s")
    return int(not agree)


if __name__ == "__main__":
    sys.exit(main())
