"""One metric of the launches of a phase and cell, and what several of them have in common.

Source: docs/method.md, "The error model".
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from connector_tax.analysis.block_model import Floats, LaunchId, Layout, Term
from connector_tax.analysis.samples import LogSample
from connector_tax.artifacts.names import configuration_of


class Quantity:
    """One metric of the launches of one phase and cell, and the contrasts formed from it."""

    def __init__(self, samples: Mapping[LaunchId, LogSample], device_of: Mapping[int, str]) -> None:
        self.samples = samples
        self.layout = Layout(
            {launch: sample.point for launch, sample in samples.items()},
            {launch.name: configuration_of(launch.name) for launch in samples},
            device_of,
        )

    def contrast(self, term: Term, blocks: Sequence[int]) -> float:
        """d: the mean over the blocks of ours minus the mean of the baseline's launches."""
        return float(self.layout.per_block([term], blocks).mean())

    def deviations(self, term: Term, blocks: Sequence[int]) -> Floats:
        """(resamples,) of `contrast` from its point, with the launches held fixed."""
        total: Floats = np.zeros(1)
        for block in blocks:
            ours, base = self.launches(term, block)
            total = total + self._deviation(ours)
            total = total - np.mean([self._deviation(launch) for launch in base], axis=0)
        mean: Floats = total / len(blocks)
        return mean

    def launches(self, term: Term, block: int) -> tuple[LaunchId, list[LaunchId]]:
        """The term's launch of a block, and the valid launches of its baseline there."""
        base = [LaunchId(name, block) for name in term.base]
        return LaunchId(term.ours, block), [launch for launch in base if launch in self.samples]

    def _deviation(self, launch: LaunchId) -> Floats:
        sample = self.samples[launch]
        return sample.replicates - sample.point


Part = tuple[Quantity, Term, str]


def mean_point(quantity: Quantity, launches: Iterable[LaunchId]) -> float:
    """The mean of the launches' logs."""
    return float(np.mean([quantity.samples[launch].point for launch in launches]))


def common_blocks(parts: Sequence[Part]) -> tuple[int, ...]:
    """The blocks in which every part has both its sides."""
    blocks = [set(quantity.layout.blocks([unit])) for quantity, unit, _ in parts]
    return tuple(sorted(set.intersection(*blocks)))


def linear_form(parts: Sequence[Part], forms: Sequence[float]) -> tuple[Layout, list[Term]]:
    """The layout and the terms whose contrast is the sum of `forms` times the parts' contrasts.

    Raises:
        ValueError: the parts are of several configurations in several cells.
    """
    terms = [unit._replace(weight=v) for (_, unit, _), v in zip(parts, forms, strict=True)]
    if len({cell for _, _, cell in parts}) == 1:
        return parts[0][0].layout, terms
    if len({unit for _, unit, _ in parts}) > 1:
        raise ValueError("a combination is of one configuration, or in one cell")
    launches = parts[0][0].samples
    values = {
        launch: sum(v * q.samples[launch].point for (q, _, _), v in zip(parts, forms, strict=True))
        for launch in launches
    }
    names = {launch.name: configuration_of(launch.name) for launch in launches}
    return Layout(values, names, parts[0][0].layout.device_of), [parts[0][1]]
