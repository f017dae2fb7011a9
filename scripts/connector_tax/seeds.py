"""Random streams named by path, so that every random choice can be repeated independently."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def named_generator(seed: str) -> "np.random.Generator":
    """Return a generator that depends only on the text of `seed`.

    `seed` is a path-like name that begins with the study's seed ("7/A/r25/arrivals"). Two names
    give independent streams, so a new consumer never shifts another one's numbers.
    """
    # Imported late: Snakemake plans without numpy.
    import numpy as np

    return np.random.default_rng(np.frombuffer(hashlib.sha256(seed.encode()).digest(), np.uint32))
