"""Several devices: the error of launches within them, the test of one tax, taxes over devices."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import f_oneway, ttest_1samp

from connector_tax.analysis.block_model import Estimate, LaunchId, Layout, Term
from connector_tax.analysis.device_model import over_devices, same_p
from connector_tax.analysis.effects import Effect, TaxTable
from connector_tax.analysis.ingest import Cell
from connector_tax.analysis.samples import LogSample
from connector_tax.analysis.taxes import adjusted_p, verdict
from connector_tax.artifacts.names import DEVICES_DIFFER, NO_TAX, TAX, CellKey, configuration_of
from connector_tax.artifacts.study_file import Study
from tests.study_folder import on_machines

NAMES = ("plain", "plain_2", "a", "b", "c", "d", "e")
BASE = ("plain", "plain_2")
WHERE = ("A", "r1", "ttft_p90")


def layout(values: dict[LaunchId, float], machines: str) -> Layout:
    names = {launch.name: configuration_of(launch.name) for launch in values}
    return Layout(values, names, dict(enumerate(machines)) if len(set(machines)) > 1 else None)


def drawn(seed: int, machines: str, interaction: float = 0.0) -> dict[LaunchId, float]:
    """A launch of each name on the machine of its block; configurations differ by machine."""
    rng = np.random.default_rng(seed)
    own = {(n, m): rng.normal(0, interaction) for n in NAMES for m in sorted(set(machines))}
    return {
        LaunchId(name, block): block + rng.normal() + (0.0 if name in BASE else own[name, machine])
        for block, machine in enumerate(machines)
        for name in NAMES
    }


def tax(values: dict[LaunchId, float], machines: str, name: str = "a") -> Estimate:
    estimate = over_devices(layout(values, machines), [Term(1.0, name, BASE)])
    assert estimate is not None
    return estimate


@given(st.integers(0, 2**32), st.floats(-5, 5), st.sampled_from(NAMES[1:]))
def test_what_a_device_does_to_a_configuration_is_no_error_of_launches(
    seed: int, shift: float, name: str
) -> None:
    values = drawn(seed, "aabb")
    moved = {k: v + shift * (k.block > 1 and k.name == name) for k, v in values.items()}
    if name == "plain_2":
        moved = {k: v + shift * (k.block > 1 and k.name in BASE) for k, v in values.items()}
    before, after = tax(values, "aabb"), tax(moved, "aabb")
    assert after.error == pytest.approx(before.error, rel=1e-6)
    assert after.df == pytest.approx(before.df)


@pytest.mark.parametrize("machines", ["aabb", "aabbbcc"])
def test_the_test_of_one_tax_is_the_textbooks_analysis_of_variance(machines: str) -> None:
    values = {k: v for k, v in drawn(3, machines, 1.0).items() if k.name in ("plain", "a")}
    paired = layout(values, machines)
    term = Term(1.0, "a", ("plain",))
    estimates = [paired.estimate([term], machine) for machine in paired.devices]
    groups = [
        [values[LaunchId("a", b)] - values[LaunchId("plain", b)]
         for b, on in enumerate(machines) if on == machine]
        for machine in paired.devices
    ]  # fmt: skip
    assert same_p([e for e in estimates if e]) == pytest.approx(f_oneway(*groups).pvalue)


def test_nothing_is_tested_without_an_error_or_a_second_device() -> None:
    single = tax(drawn(1, "ab"), "ab")
    assert same_p([single]) is None
    values = {k: v for k, v in drawn(1, "ab").items() if k.name != "plain_2"}
    lone = [layout(values, "ab").estimate([Term(1.0, "a", ("plain",))], m) for m in "ab"]
    assert same_p([e for e in lone if e]) is None


def test_one_configuration_over_devices_is_judged_by_the_paired_t_test() -> None:
    machines = "aabbccdd"
    values = {k: v for k, v in drawn(5, machines, 1.0).items() if k.name in ("a", *BASE)}
    estimate = tax(values, machines)
    contrasts = [
        values[LaunchId("a", b)] - np.mean([values[LaunchId(name, b)] for name in BASE])
        for b in range(8)
    ]
    by_device = np.reshape(contrasts, (4, 2)).mean(axis=1)
    assert estimate.point == pytest.approx(by_device.mean())
    assert estimate.df == 3
    assert estimate.p == pytest.approx(ttest_1samp(by_device, 0).pvalue)
    assert estimate.devices == 4


def test_two_devices_and_the_aa_comparison_keep_the_error_of_launches() -> None:
    values = drawn(2, "aabbcc", 1.0)
    three = layout(values, "aabbcc")
    again = [Term(1.0, "plain_2", ("plain",))]
    assert over_devices(three, again) == three.estimate(again)
    assert tax(drawn(2, "aabb"), "aabb").devices == 0
    assert tax(values, "aabbcc").devices == 3


def coverage(machines: str, interaction: float, *, over: bool) -> float:
    covered = []
    for seed in range(120):
        values = drawn(seed, machines, interaction)
        for name in NAMES[2:]:
            of_launches = layout(values, machines).estimate([Term(1.0, name, BASE)])
            estimate = tax(values, machines, name) if over else of_launches
            assert estimate is not None
            covered.append(abs(estimate.point) <= (estimate.half_width(0.95) or 0.0))
    return float(np.mean(covered))


@pytest.mark.long
@pytest.mark.parametrize("machines", ["abcd", "aabbccdd"])
@pytest.mark.parametrize("interaction", [0.0, 2.0])
def test_taxes_over_devices_cover_what_other_devices_would_say(
    machines: str, interaction: float
) -> None:
    """600 intervals; those of a study share plain's launches: two standard errors are 3 points."""
    assert 0.92 < coverage(machines, interaction, over=True) < 0.98
    if interaction and machines == "aabbccdd":
        assert coverage(machines, interaction, over=False) < 0.7


def table(points: dict[str, list[float]], machines: str) -> TaxTable:
    """Launches of given logs by block, of which requests make next to no noise."""
    rng = np.random.default_rng(0)
    nodes = on_machines(*machines)
    samples = {
        CellKey(name, block, "A", "r1"): {
            "ttft_p90": LogSample(value, value + rng.normal(0, 1e-6, 200), 100)
        }
        for name, values in points.items()
        for block, value in enumerate(values)
    }
    cells = [
        Cell(k, configuration_of(k.config), "valid", None, Path(), {}, None, 1.0, 1, 1,
             (nodes[k.block],))
        for k in samples
    ]  # fmt: skip
    document: Any = {
        "blocks": len(machines),
        "config": {"statistics": {"confidence": 0.95, "margins": {"ttft_p90": 0.03}}},
        "configurations": [],
        "run_order": {"A": [{"config": k.config, "block": k.block} for k in samples]},
    }
    return TaxTable(Study(Path(), document), cells, samples, {})


def two_devices() -> TaxTable:
    """Devices a and b, alike in all else: x costs 10 and 30 %, y 10 % on both, z 10 and 11 %."""
    rng = np.random.default_rng(7)
    costs = {"plain": (0, 0), "plain_2": (0, 0), "x": (10, 30), "y": (10, 10), "z": (10, 11)}
    noise = {name: rng.normal(0, 5e-4, 3).tolist() for name in costs}
    return table(
        {
            name: [float(np.log1p(cost / 100)) + n for cost in both for n in noise[name]]
            for name, both in costs.items()
        },
        "aaabbb",
    )


def judged(study: TaxTable, config: str) -> str:
    effect = study.tax(config, *WHERE)
    assert effect is not None
    return verdict(effect, adjusted_p(effect, [effect.estimate]), 0.03, 0.95)


def test_where_devices_differ_there_is_no_verdict_for_all() -> None:
    study = two_devices()
    names = ("x", "y", "z", "plain_2")
    assert [judged(study, name) for name in names] == [DEVICES_DIFFER, TAX, TAX, NO_TAX]
    tests = {name: study.device_test(name, *WHERE) for name in names}
    assert {name: differ for name, (_, differ) in tests.items()} == {
        "x": True, "y": False, "z": False, "plain_2": False,
    }  # fmt: skip
    assert tests["y"][0] == pytest.approx(1)
    # Surely different, and by less than the margin.
    assert (tests["z"][0] or 1.0) < 0.001


def test_each_device_has_its_taxes_and_its_aa() -> None:
    study = two_devices()
    a, b = dict.fromkeys(study.device_of.values())

    def on(device: str, config: str) -> Effect:
        effect = study.tax_on(device, config, *WHERE)
        assert effect is not None
        return effect

    assert [on(d, "x").point for d in (a, b)] == pytest.approx([0.1, 0.3], abs=0.002)
    assert [on(d, "plain_2").point for d in (a, b)] == pytest.approx([0, 0], abs=0.002)
    assert on(a, "x").n_blocks == 3
    assert on(a, "x").lo < 0.1 < on(a, "x").hi
    # Both devices' launches say how much launches differ.
    pooled = study.tax("x", *WHERE)
    assert pooled is not None
    assert on(a, "x").estimate.df == pooled.estimate.df


def test_with_three_devices_the_method_says_so() -> None:
    rng = np.random.default_rng(1)
    names = ("plain", "plain_2", "x", "y", "z")
    study = table({name: list(rng.normal(0, 0.01, 6)) for name in names}, "aabbcc")
    effect, noise = study.tax("x", *WHERE), study.tax("plain_2", *WHERE)
    assert effect is not None
    assert noise is not None
    assert effect.interval.method.startswith("block model over 3 devices (df ")
    assert noise.interval.method == "block model (df 15)"
