"""Second opinions about a tax: the block model by Huber's estimate, and a randomisation test.

Least squares lets one bad launch in twenty take two thirds of a study's power; Huber's estimate
bounds what a launch can do (Huber, Annals of Mathematical Statistics 35 (1964) 73; standard errors:
Huber & Ronchetti, Robust Statistics, 2nd ed., eq. 7.81). The randomisation test assumes nothing but
the random order of launches in a block (Fisher, The Design of Experiments, 1935).
"""

from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student

from connector_tax.analysis.block_model import Floats, Launches

QUARTILE = 0.6745  # of the normal distribution
TUNING = 1.345  # 95% of least squares' efficiency where errors are normal
ROUNDS, SETTLED = 200, 1e-10
MOST_ORDERS, DRAWS = 1 << 20, 100_000


def huber(
    launches: Launches, ours: str, base: Sequence[str], confidence: float
) -> tuple[float, float, float] | None:
    """The launches `ours` against those of `base`, and the interval, in the values' unit.

    None where no residual is left.
    """
    others = [name for name in base if name != ours]
    names, blocks = np.unique(launches.name), np.unique(launches.block)
    columns = np.column_stack(
        [launches.block[:, None] == blocks, launches.name[:, None] == names[1:]]
    ).astype(float)
    rank = int(np.linalg.matrix_rank(columns))
    df = len(launches) - rank
    weights = np.concatenate([np.zeros(len(blocks)), (names == ours).astype(float)])
    weights[len(blocks) :][np.isin(names, others)] = -1 / len(set(names) & set(others))
    contrast = np.delete(weights, len(blocks))
    inverse = np.linalg.pinv(columns.T @ columns)
    # Blocks that the two do not share would leave the difference undetermined.
    if df < 1 or not np.allclose(contrast @ inverse @ columns.T @ columns, contrast):
        return None
    y = launches.y - launches.y.mean()
    beta, scale, residual = _fitted(columns, y)
    if scale == 0:
        return None
    inner = np.abs(residual) <= TUNING * scale
    bounded = np.clip(residual, -TUNING * scale, TUNING * scale)
    share = inner.mean()
    if share == 0:
        return None
    correction = 1 + rank / len(y) * (1 - share) / share
    variance = correction**2 * float(bounded @ bounded) / df / share**2
    half = float(student.ppf((1 + confidence) / 2, df))
    half *= float(np.sqrt(variance * (contrast @ inverse @ contrast)))
    point = float(contrast @ beta)
    return point, point - half, point + half


def _fitted(columns: Floats, y: Floats) -> tuple[Floats, float, Floats]:
    """Coefficients, scale and residuals, by weighted least squares until they settle."""
    weight = np.ones(len(y))
    beta: Floats = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        root = np.sqrt(weight)
        solved = np.linalg.lstsq(columns * root[:, None], y * root, rcond=None)[0]
        new = np.asarray(solved, np.float64)
        residual = y - columns @ new
        scale = float(np.median(np.abs(residual))) / QUARTILE
        settled = np.abs(columns @ (new - beta)).max() <= SETTLED * max(scale, 1e-12)
        beta = new
        if settled or scale == 0:
            break
        weight = np.minimum(1, TUNING * scale / np.maximum(np.abs(residual), 1e-300))
    return beta, scale, residual


def randomisation_p(
    launches: Launches, ours: str, base: Sequence[str], blocks: Sequence[int]
) -> float:
    """Two-sided p of the mean difference, over every exchange of `ours` with the baseline's.

    In each block, of the launches of `base` and `ours`, each could have been `ours`. Exact up to
    MOST_ORDERS exchanges, of DRAWS random ones beyond.
    """
    each = []
    for block in blocks:
        here = launches.block == block
        own = launches.y[here & (launches.name == ours)]
        rest = launches.y[here & np.isin(launches.name, [n for n in base if n != ours])]
        values = np.concatenate([own, rest])
        each.append((values * len(values) - values.sum()) / len(rest))
    observed = sum(float(d[0]) for d in each)
    if np.prod([float(len(d)) for d in each]) <= MOST_ORDERS:
        sums = np.zeros(1)
        for differences in each:
            sums = (sums[:, None] + differences).ravel()
    else:
        generator = np.random.default_rng(0)
        sums = np.sum([generator.choice(d, DRAWS) for d in each], axis=0)
        sums = np.append(sums, observed)
    return float(np.mean(np.abs(sums) >= abs(observed) * (1 - 1e-9)))
