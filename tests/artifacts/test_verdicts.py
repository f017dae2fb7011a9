"""What an interval says: never against the interval, and nothing is said twice."""

from hypothesis import given
from hypothesis import strategies as st

from connector_tax.artifacts.verdicts import (
    CANNOT_TELL,
    VERDICTS,
    costs,
    gains,
    in_words,
    less,
    verdict_of,
)

widths = st.floats(0, 0.5)


@given(st.floats(-0.5, 0.5), widths, st.floats(0, 1), st.floats(1e-3, 0.3))
def test_no_verdict_is_against_its_interval(
    point: float, half: float, share: float, margin: float
) -> None:
    interval = point - half, point + half
    narrow = point - share * half, point + share * half
    said = verdict_of(interval, narrow, margin)
    assert said in VERDICTS
    if less(said):
        assert max(map(abs, narrow)) <= margin
    if costs(said):
        assert interval[0] > 0
    if gains(said):
        assert interval[1] < 0
    if interval[0] > 0 or interval[1] < 0:
        assert costs(said) or gains(said)
    if said == CANNOT_TELL:
        assert max(map(abs, narrow)) > margin


@given(st.floats(-0.1, 0.1), widths, st.floats(1e-3, 0.3), st.floats(1, 3))
def test_a_wider_margin_never_takes_anything_back(
    point: float, half: float, margin: float, factor: float
) -> None:
    interval, narrow = (point - half, point + half), (point - half / 2, point + half / 2)
    near, far = (verdict_of(interval, narrow, m) for m in (margin, factor * margin))
    assert less(far) or not less(near)
    assert (costs(near), gains(near)) == (costs(far), gains(far))


def test_a_cost_below_the_margin_says_both() -> None:
    said = verdict_of((0.025, 0.092), (0.031, 0.086), 0.10)
    assert in_words(said, 0.10) == "costs, less than 10%"
    assert in_words(verdict_of((0.025, 0.092), (0.031, 0.086), 0.03), 0.03) == "costs"
    assert in_words(verdict_of((0, 0), (0, 0), 0), None) == "equal"
