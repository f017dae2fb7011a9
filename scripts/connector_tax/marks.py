"""The mark of each configuration in all figures.

Colours are Okabe & Ito's colour-blind-safe set (their yellow, too pale for lines, is grey here). No
information depends on colour alone: each configuration also has its own marker and line style.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Without Matplotlib, since the check of a configuration uses these marks.
    from matplotlib.typing import LineStyleType


@dataclass(frozen=True)
class Mark:
    """A configuration's colour, marker and line, the same in every figure."""

    color: str
    marker: str
    line: "LineStyleType"
    filled: bool = True


DESIGN_MARKS: Mapping[str, Mark] = {
    "plain": Mark("#000000", "o", "-"),
    "noop_connector": Mark("#808080", "s", (0, (4, 1.2))),
    "mooncake_producer": Mark("#56B4E9", "^", (0, (1, 1))),
    "mooncake_consumer": Mark("#0072B2", "v", (0, (5, 1, 1, 1))),
    "mooncake_both": Mark("#D55E00", "D", "-"),
    "nixl_both": Mark("#009E73", "P", (0, (3, 1, 1, 1, 1, 1))),
    "lmcache_only": Mark("#E69F00", "h", (0, (6, 1.5))),
    "multi_mooncake_lmcache": Mark("#CC79A7", "*", (0, (2, 1))),
}
AA_MARK = Mark("#000000", "o", (0, (1, 1.6)), filled=False)
SPARE_MARKS = (
    Mark("#7A4A12", "<", "-"),
    Mark("#332288", ">", (0, (4, 1.2))),
    Mark("#117733", "p", (0, (1, 1))),
    Mark("#882255", "d", (0, (5, 1, 1, 1))),
)


def marks_of(configurations: Iterable[str]) -> dict[str, Mark]:
    """Return each configuration's mark by id: the design's, a spare mark, or an open mark.

    Open marks pair the same colours and markers anew, so that there is one for every configuration.
    """
    known = [*DESIGN_MARKS.values(), *SPARE_MARKS]
    open_marks = (_open_mark(known, number) for number in itertools.count())
    spare = itertools.chain(SPARE_MARKS, open_marks)
    return {i: DESIGN_MARKS[i] if i in DESIGN_MARKS else next(spare) for i in configurations}


def _open_mark(known: Sequence[Mark], number: int) -> Mark:
    rounds, position = divmod(number, len(known))
    mark, other = known[position], known[(position + 1 + rounds) % len(known)]
    return Mark(mark.color, other.marker, other.line, filled=False)
