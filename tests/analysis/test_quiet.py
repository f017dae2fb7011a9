"""The rule by which requests that met a disturbance are left out: exact, and twice the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_tax.analysis.quiet import judge_chunks, undisturbed
from connector_tax.analysis.validity import MACHINE_CHECKS, Watched, assess, void_reasons
from connector_tax.provenance.audit_machine import disturbed_chunks, quiet_seqs

RULE: dict[str, Any] = {
    "chunk_ms": 100, "chunk_percentile": 50, "level_percentile": 10, "max_factor": 1.5,
}  # fmt: skip
MS = 1_000_000


def samples(levels: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ten samples in each chunk of 100 ms, at the chunk's level."""
    t_ns = 1000 * MS + 10 * MS * np.arange(10 * len(levels) + 1)
    return t_ns, np.repeat([*levels, levels[-1]], [10] * len(levels) + [1])


def test_what_touches_a_disturbed_chunk_is_left_out_and_nothing_else() -> None:
    chunks = judge_chunks(*samples([100, 100, 100, 200, 100, 100]), RULE)
    assert chunks.level_ns == 100
    assert chunks.disturbed.tolist() == [False, False, False, True, False, False]
    spans = {
        (1000, 1299): True,  # before it, to its last moment
        (1000, 1300): False,  # the last token falls in it
        (1350, 1360): False,  # within it
        (1250, 1450): False,  # across it
        (1399, 1500): False,  # begun in it
        (1400, 1600): True,  # after it, to the last sample
        (999, 1100): False,  # begun before anybody looked
        (1500, 1601): False,  # ended after the last look
    }
    starts, ends = MS * np.array(list(spans)).T
    assert undisturbed(chunks, starts, ends).tolist() == list(spans.values())


def test_a_chunk_nobody_watched_is_disturbed_also_without_a_factor() -> None:
    t_ns, memory = samples([100] * 4)
    gap = (t_ns < 1100 * MS) | (t_ns > 1180 * MS)
    for factor in (1.5, None):
        chunks = judge_chunks(t_ns[gap], memory[gap], {**RULE, "max_factor": factor})
        assert chunks.disturbed.tolist() == [False, True, False, False]


def test_too_few_samples_for_a_chunk_leave_everything_out() -> None:
    for count in (0, 1, 5):
        t_ns, memory = (values[:count] for values in samples([100]))
        chunks = judge_chunks(t_ns, memory, RULE)
        assert not undisturbed(chunks, np.array([1001 * MS]), np.array([1002 * MS])).any()


@given(
    gaps=st.lists(st.integers(1, 60), min_size=1, max_size=150),
    seed=st.integers(0, 1000),
    factor=st.one_of(st.none(), st.floats(1.01, 3)),
    chunk_ms=st.sampled_from([100, 150, 333.3]),
    percentile=st.sampled_from([25, 50, 90]),
)
def test_the_audit_leaves_out_the_same_requests(
    gaps: list[int], seed: int, factor: float | None, chunk_ms: float, percentile: float
) -> None:
    rng = np.random.default_rng(seed)
    t_ns = 1000 * MS + MS * np.cumsum(gaps)
    memory = rng.lognormal(10, 0.5, len(gaps)).astype(np.int64)
    rule = {**RULE, "chunk_ms": chunk_ms, "chunk_percentile": percentile, "max_factor": factor}
    chunks = judge_chunks(t_ns, memory, rule)
    # Edges are where the two could part: whole milliseconds, and the edges themselves.
    moments = np.concatenate([rng.integers(990, t_ns[-1] // MS + 10, 60) * MS, chunks.edges_ns])
    starts = rng.choice(moments, 80)
    ends = np.maximum(starts, rng.choice(moments, 80))
    requests = [
        {"seq": k, "status": "ok", "t_intended_ns": int(a), "t_last_token_ns": int(b)}
        for k, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    again = disturbed_chunks(list(zip(t_ns.tolist(), memory.tolist(), strict=True)), rule)
    assert [bad for _, _, bad in again] == chunks.disturbed.tolist()
    kept = np.flatnonzero(undisturbed(chunks, starts, ends)).tolist()
    assert quiet_seqs(again, requests) == kept


def checks(watched: Watched | None) -> dict[str, Any]:
    """The checks of a cell without a single record."""
    bounds = dict.fromkeys(
        ("schedule_lag_p99_ms", "schedule_lag_ttft_fraction", "sent_rate_tolerance",
         "max_error_rate", "loop_lag_p99_ms", "loop_lag_max_ms", "max_cpu_share",
         "max_idle_memory_factor",
         "max_foreign_cpu", "max_steal"), 1.0,
    )  # fmt: skip
    return assess(
        records=[], planned=0, shape=(1, 1), counters={"before": {}, "after": {}}, scrapes=[],
        window={"t_origin_ns": 0, "t_warmup_end_ns": 1, "t_stop_ns": 2},
        health={"processes": {"main": {}}}, clock="worker", bounds=bounds, watched=watched,
    )  # fmt: skip


@pytest.mark.parametrize("name", MACHINE_CHECKS)
def test_a_machine_that_was_to_be_watched_and_was_not_voids_the_cell(name: str) -> None:
    assert name not in checks(None)
    quiet = {**RULE, "min_quiet_share": 0.5}
    found = checks(Watched(machine=None, quiet=quiet, wanted=10, level_ns=50.0))
    assert found[name]["value"] is None
    assert any(f"{name} missing" in reason for reason in void_reasons(found))
