"""Arrival processes: absolute send offsets, made before the run starts.

An arrival process at rate λ is a sequence of gaps X₁, X₂, …; request k is due X₁ + … + X_k after
the origin, except that the fixed process starts at the origin itself. Offsets are absolute, so that
a late request never delays the following ones (no drift), and no gap is ever truncated: cutting
the exponential at 3/λ raises the rate by 5.2% and lowers the coefficient of variation to 0.88.

| kind     | gap                                | mean | coefficient of variation |
|----------|------------------------------------|------|--------------------------|
| fixed    | 1/λ                                | 1/λ  | 0                        |
| jittered | k is due anywhere in [k/λ, (k+1)/λ) | 1/λ  | 1/√6                     |
| poisson  | exponential(1/λ)                   | 1/λ  | 1                        |
| gamma    | gamma(shape k, scale 1/(λ k))      | 1/λ  | 1/√k                     |
"""

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from connector_tax.seeds import named_generator

ArrivalKind = Literal["fixed", "jittered", "poisson", "gamma"]

_NS = 1_000_000_000


def make_offsets(
    kind: ArrivalKind,
    rate_rps: float,
    horizon_s: float,
    seed: str,
    gamma_shape: float | None = None,
) -> NDArray[np.int64]:
    """Return the offsets in ns, ascending, of every arrival in [0, horizon_s).

    Lengthening the horizon keeps the arrivals already there (the process is extended, not redrawn).

    Raises:
        ValueError: unknown kind, rate or horizon not positive and finite, or a gamma shape that is
            missing for `gamma` or given for another kind.
    """
    if kind not in get_args(ArrivalKind):
        raise ValueError(f"arrival kind is {kind!r}; allowed: {', '.join(get_args(ArrivalKind))}")
    for name, value in (("rate_rps", rate_rps), ("horizon_s", horizon_s)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; it must be a positive number")
    if (kind == "gamma") != (gamma_shape is not None):
        raise ValueError(f"gamma_shape is {gamma_shape!r} for kind {kind!r}; only gamma takes one")
    if kind == "fixed":
        count = math.ceil(horizon_s * rate_rps)
        offsets_s = np.arange(count + 1) / rate_rps
    elif kind == "jittered":
        count = math.ceil(horizon_s * rate_rps)
        offsets_s = (np.arange(count + 1) + named_generator(seed).random(count + 1)) / rate_rps
    else:
        offsets_s = _random_offsets(rate_rps, horizon_s, seed, gamma_shape)
    offsets_ns = np.rint(offsets_s * _NS).astype(np.int64)
    return offsets_ns[offsets_ns < round(horizon_s * _NS)]


def _random_offsets(
    rate_rps: float, horizon_s: float, seed: str, gamma_shape: float | None
) -> NDArray[np.float64]:
    if gamma_shape is not None and not (math.isfinite(gamma_shape) and gamma_shape > 0):
        raise ValueError(f"gamma_shape is {gamma_shape!r}; it must be a positive number")
    shape = 1.0 if gamma_shape is None else gamma_shape
    generator = named_generator(seed)
    chunks: list[NDArray[np.float64]] = []
    reached = 0.0
    while reached < horizon_s:
        # A chunk of constant size keeps earlier arrivals the same whatever the horizon is.
        gaps = generator.gamma(shape, 1.0 / (rate_rps * shape), size=4096)
        chunks.append(reached + np.cumsum(gaps))
        reached = float(chunks[-1][-1])
    return np.concatenate(chunks)
