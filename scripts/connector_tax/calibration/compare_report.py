"""Calibrate `compare` and `gate`: coverage of ratios, false alarms, power, from virtual pairs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

from connector_tax.calibration.coverage import TARGET, Workers, truth_logs
from connector_tax.calibration.design import study_document
from connector_tax.calibration.pairs import (
    BLOCKS,
    IN_B,
    OFFSETS,
    gate_results,
    one_gate,
    truths,
)
from connector_tax.calibration.report import command_parser, publish, table_lines
from connector_tax.calibration.studies import METRICS
from connector_tax.compare.gate import ABOVE, BELOW
from connector_tax.compare.rows import AA, HIGHER, LATENCY, LOWER, SAME, TAX
from connector_tax.machine import machine

Outcome = Mapping[str, Any]
Truths = Mapping[tuple[str, str, str], tuple[float, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and gate pairs of virtual studies whose differences are known."""
    parser = command_parser("calibration.compare_report", main.__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--truth-launches", type=int, default=1000)
    arguments = parser.parse_args(argv)
    rules = study_document("poisson", arguments.seed, 1)["config"]["cell"]
    with Workers() as workers:
        task = {"cell": rules, "seed": arguments.seed}
        (logs,) = truth_logs(workers, "pair_truth", arguments.truth_launches, [task])
        tasks = [{"number": number, "seed": arguments.seed} for number in range(arguments.pairs)]
        by_pair = dict(workers.run("pair", tasks))
    outcomes = [row for number in sorted(by_pair) for row in by_pair[number]]
    result = summary(outcomes, truths(logs))
    result |= {"machine": machine(), "seed": arguments.seed, "pairs": arguments.pairs}
    publish(arguments.out / "pairs", result, report(result))
    return 0


def summary(outcomes: Sequence[Outcome], known: Truths) -> dict[str, Any]:
    """Coverage and verdicts of each comparison, and what the gate answered."""
    return {
        "ratios": [_ratio(outcomes, key, truth) for key, truth in known.items() if key[0] != "A"],
        "pooled": [
            _pooled(outcomes, known, quantity, metric)
            for quantity in (TAX, LATENCY)
            for metric in METRICS
        ],
        "gate": [
            _gate(outcomes, known, metric, offset) for metric in METRICS for offset in OFFSETS
        ],
        "together": [_together(outcomes, known, metric) for metric in METRICS],
    }


def _members(outcomes: Sequence[Outcome], key: tuple[str, str, str]) -> list[Outcome]:
    return [o for o in outcomes if (o["quantity"], o["config"], o["metric"]) == key]


def _covers(outcome: Outcome, truth: float) -> bool:
    return bool(outcome["effect_lo"] <= np.exp(truth) <= outcome["effect_hi"])


def _ratio(
    outcomes: Sequence[Outcome], key: tuple[str, str, str], truth: tuple[float, float]
) -> dict[str, Any]:
    members = _members(outcomes, key)
    covered = sum(_covers(o, truth[0]) for o in members)
    ends = binomtest(covered, len(members)).proportion_ci(0.95)
    halves = [(o["effect_hi"] - o["effect_lo"]) / 2 for o in members]
    return {
        **dict(zip(("quantity", "config", "metric"), key, strict=True)),
        "truth": float(np.exp(truth[0])),
        "truth_se": float(np.exp(truth[0]) * truth[1]),
        "covered": covered / len(members),
        "covered_lo": ends.low,
        "covered_hi": ends.high,
        "half_width": float(np.median(halves)),
        "error_df": float(np.median([o["error_df"] for o in members])),
        **{word: _share(members, word) for word in (HIGHER, LOWER, SAME)},
    }


def _share(members: Sequence[Outcome], verdict: str) -> float:
    return float(np.mean([o["verdict"] == verdict for o in members]))


def _pooled(
    outcomes: Sequence[Outcome], known: Truths, quantity: str, metric: str
) -> dict[str, Any]:
    """Coverage over the configurations; its interval is from one number for each pair."""
    by_pair: dict[int, list[bool]] = {}
    for o in outcomes:
        key = (o["quantity"], o["config"], o["metric"])
        if (key[0], key[2]) == (quantity, metric) and key[1] != AA:
            by_pair.setdefault(o["pair"], []).append(_covers(o, known[key][0]))
    shares = np.array([np.mean(hits) for hits in by_pair.values()])
    error = float(shares.std(ddof=1) / np.sqrt(len(shares)))
    return {
        "quantity": quantity,
        "metric": metric,
        "covered": float(shares.mean()),
        "standard_error": error,
        "in_target": bool(TARGET[0] <= shares.mean() <= TARGET[1]),
    }


def _gates(outcomes: Sequence[Outcome], config: str, metric: str) -> list[Mapping[str, float]]:
    return [o["gate"] for o in _members(outcomes, (TAX, config, metric))]


def _gate(outcomes: Sequence[Outcome], known: Truths, metric: str, offset: float) -> dict[str, Any]:
    """Shares over the configurations: `below` for a bound above the tax, `above` for one below."""
    passed, alarmed, wrong_pass, false_alarm = [], [], [], []
    for config in IN_B:
        truth, gates = known["A", config, metric][0], _gates(outcomes, config, metric)
        higher, lower = (gate_results(gates, truth, sign * offset) for sign in (1, -1))
        passed.append(higher[BELOW])
        false_alarm.append(higher[ABOVE])
        alarmed.append(lower[ABOVE])
        wrong_pass.append(lower[BELOW])
    names = ("below", "false_alarm", "above", "wrong_pass")
    means = (float(np.mean(v)) for v in (passed, false_alarm, alarmed, wrong_pass))
    return {"metric": metric, "offset": offset, **dict(zip(names, means, strict=True))}


def _together(outcomes: Sequence[Outcome], known: Truths, metric: str) -> dict[str, Any]:
    """How often one of all configurations, each at its true tax as bound, raises an alarm."""
    columns = [
        [one_gate(g, float(np.expm1(known["A", c, metric][0])), len(IN_B)) == ABOVE
         for g in _gates(outcomes, c, metric)]
        for c in IN_B
    ]  # fmt: skip
    alarms = [any(row) for row in zip(*columns, strict=True)]
    ends = binomtest(sum(alarms), len(alarms)).proportion_ci(0.95)
    return {
        "metric": metric,
        "false_alarm": float(np.mean(alarms)),
        "lo": ends.low,
        "hi": ends.high,
    }


def report(result: Mapping[str, Any]) -> str:
    """The result as a text."""

    def percent(name: str, decimals: int = 1) -> Callable[[Outcome], str]:
        return lambda row: f"{100 * row[name]:.{decimals}f}"

    lines = [
        f"compare and gate on {result['pairs']} pairs of virtual studies, seed {result['seed']}",
        f"machine: {result['machine']}",
        f"A: {BLOCKS['A']} blocks; B: {BLOCKS['B']} blocks, dearer steps, a wider spread, other"
        " taxes. All in %; TARGET 93 to 97 covered.",
        *table_lines(
            result["pooled"],
            {
                "quantity": lambda r: r["quantity"],
                "metric": lambda r: r["metric"],
                "covered": percent("covered"),
                "standard error": percent("standard_error"),
                "in target": lambda r: "yes" if r["in_target"] else "NO",
            },
        ),
        *table_lines(
            result["ratios"],
            {
                "quantity": lambda r: r["quantity"],
                "configuration": lambda r: r["config"],
                "metric": lambda r: r["metric"],
                "true ratio": lambda r: f"{r['truth']:.4f} ± {r['truth_se']:.4f}",
                "covered": lambda r: (
                    f"{percent('covered')(r)} [{percent('covered_lo')(r)},"
                    f" {percent('covered_hi')(r)}]"
                ),
                "half-width": percent("half_width", 2),
                "df": lambda r: f"{r['error_df']:.1f}",
                **{word: percent(word) for word in (HIGHER, LOWER, SAME)},
            },
        ),
        "Gate on A: the bound stands so far from the true tax (percentage points).",
        *table_lines(
            result["gate"],
            {
                "metric": lambda r: r["metric"],
                "off": percent("offset"),
                "bound above: passes": percent("below"),
                "false alarm": percent("false_alarm"),
                "bound below: alarms": percent("above"),
                "wrong pass": percent("wrong_pass"),
            },
        ),
        f"All {len(IN_B)} configurations together, each at its true tax as bound: any alarm.",
        *table_lines(
            result["together"],
            {
                "metric": lambda r: r["metric"],
                "false alarm": lambda r: (
                    f"{percent('false_alarm')(r)} [{percent('lo')(r)}, {percent('hi')(r)}]"
                ),
            },
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
