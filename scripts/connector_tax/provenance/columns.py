"""JSON-lines files by column, and back to the same bytes: what compresses to half of the lines.

The text of such files is cut at its numbers. A line is then one of few *shapes*, with a NUL in
place of each number, and the numbers of a shape are columns. Lines of text, the last without end:

    {"files": [[name, lines], ...], "shapes": [shape, ...]}
    the number of its shape for each line of all files, in order
    a column for each NUL of each shape: `=` and its numbers, or `+` and their differences
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence

NUMBER = re.compile(rb"\d+(?:\.\d+)?")
# Of these nothing is lost as an integer, nor does a difference of two take many digits.
INTEGER = re.compile(rb"(?:0|[1-9]\d{0,17})")


def fits(data: bytes) -> bool:
    """Whether a file can be written by column."""
    return data.endswith(b"\n") and b"\0" not in data


def encode(files: Mapping[str, bytes]) -> bytes:
    """Files that fit, by column."""
    shapes: dict[bytes, list[list[bytes]]] = {}
    numbers: dict[bytes, int] = {}
    order = []
    for data in files.values():
        for line in data.split(b"\n")[:-1]:
            shape, values = NUMBER.sub(b"\0", line), NUMBER.findall(line)
            columns = shapes.setdefault(shape, [[] for _ in values])
            for column, value in zip(columns, values, strict=True):
                column.append(value)
            order.append(b"%d" % numbers.setdefault(shape, len(numbers)))
    header = {
        "files": [(name, data.count(b"\n")) for name, data in files.items()],
        "shapes": [shape.decode("latin-1") for shape in shapes],
    }
    columns = [column for of_shape in shapes.values() for column in of_shape]
    return b"\n".join([json.dumps(header).encode(), b" ".join(order), *map(_written, columns)])


def _written(column: Sequence[bytes]) -> bytes:
    if not all(map(INTEGER.fullmatch, column)):
        return b"=" + b" ".join(column)
    values = list(map(int, column))
    return b"+" + b" ".join(b"%d" % (b - a) for a, b in itertools.pairwise((0, *values)))


def _read(column: bytes) -> Iterator[bytes]:
    values = column[1:].split()
    if column[:1] != b"+":
        return iter(values)
    return (b"%d" % value for value in itertools.accumulate(map(int, values)))


def decode(data: bytes, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The files, each of at most the size that is listed for it.

    Raises:
        Exception: it is nothing that `encode` made.
    """
    head, order, *rest = data.split(b"\n")
    header, columns, numbers = json.loads(head), iter(rest), map(int, order.split())
    shapes = [shape.encode("latin-1").split(b"\0") for shape in header["shapes"]]
    values = [[_read(next(columns)) for _ in shape[1:]] for shape in shapes]
    files = {}
    for name, count in header["files"]:
        lines, left = [], sizes[name]
        for number in itertools.islice(numbers, count):
            first, *parts = shapes[number]
            between = zip(values[number], parts, strict=True)
            lines.append(first + b"".join(next(value) + part for value, part in between) + b"\n")
            left -= len(lines[-1])
            if left < 0:
                raise ValueError(f"{name}: more than the {sizes[name]} bytes that are listed")
        files[name] = b"".join(lines)
    return files
