"""Traces in the Mooncake format: requests with arrival times, lengths, and ids of shared blocks.

A trace has one JSON object per line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in ms; lengths are in tokens. `hash_ids` has one id for each block of 512 prompt
tokens; the last block may be shorter. Prompts whose lists begin with the same ids share these
blocks. Without the list no token is shared. Format: github.com/kvcache-ai/Mooncake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from connector_tax.loadgen.sessions import LONGEST_S, WORDS, Node, Singles
from connector_tax.seeds import named_generator

BLOCK = 512
"""Prompt tokens per id in the published traces."""
Length = Annotated[int, Meta(ge=1, lt=2**31)]


class TraceLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a trace; `timestamp` is in ms, lengths are in tokens."""

    timestamp: Annotated[float, Meta(ge=0, le=LONGEST_S * 1e3)]
    input_length: Length
    output_length: Length
    hash_ids: tuple[int, ...] | None = None


def read_trace(path: Path, limit: int | None = None, block: int = BLOCK) -> "Trace":
    """Read the first `limit` requests of a trace; timestamps become relative to the earliest.

    Raises:
        ValueError: a line is not a request, or its ids do not fit its length; names file, line and
            key.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    lines: list[TraceLine] = []
    with path.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            if limit is not None and len(lines) >= limit:
                break
            try:
                line = decoder.decode(text)
            except msgspec.DecodeError as error:
                raise ValueError(
                    f"{path}:{number}: {error}; allowed: an object with timestamp, input_length, "
                    "output_length and hash_ids"
                ) from None
            blocks = -(-line.input_length // block)
            if line.hash_ids is not None and len(line.hash_ids) != blocks:
                raise ValueError(
                    f"{path}:{number}: hash_ids has {len(line.hash_ids)} ids for an input_length "
                    f"of {line.input_length}; allowed: {blocks}, one for each {block} tokens "
                    "(--trace-block)"
                )
            lines.append(line)
    if not lines:
        raise ValueError(f"{path}: holds no request")
    lines.sort(key=lambda line: line.timestamp)
    return Trace(tuple(lines), block)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their timestamps; an id stands for `block` tokens."""

    lines: tuple[TraceLine, ...]
    block: int = BLOCK

    def __len__(self) -> int:
        return len(self.lines)

    def offsets_ns(self, speed: float = 1.0) -> NDArray[np.int64]:
        """Return the starts in ns after the first one, ascending, divided by `speed`."""
        stamps_ms = np.array([line.timestamp for line in self.lines])
        starts_ns = (stamps_ms - stamps_ms[0]) * (1e6 / speed)
        offsets: NDArray[np.int64] = np.rint(starts_ns).astype(np.int64)
        return offsets

    @property
    def singles(self) -> Singles:
        """Return a session of one request for each line, with the line's output length."""
        return Singles(len(self), Node("0", "", 1), [line.output_length for line in self.lines])

    @property
    def duration_s(self) -> float:
        return (self.lines[-1].timestamp - self.lines[0].timestamp) / 1e3

    @property
    def repeated_share(self) -> float:
        """Return the share of prompt tokens that repeat a prefix of an earlier request."""
        sent: dict[int, int] = {}  # tokens of each block
        known = total = 0
        for line, numbers in zip(self.lines, number_blocks(self)[0], strict=True):
            total += line.input_length
            for index, number in enumerate(numbers):
                count = min(self.block, line.input_length - index * self.block)
                known += min(count, sent.get(number, 0))
                sent[number] = max(count, sent.get(number, 0))
        return known / total


def number_blocks(trace: Trace) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
    """Assign a number to each distinct list of leading ids in a trace.

    Returns:
        The block numbers of each request and, by block number, the preceding block (-1: none) and
            the number of other blocks that already followed that block.
    """
    numbers: dict[tuple[int, int], int] = {}
    followers: dict[int, int] = {}
    places: list[tuple[int, int]] = []

    def new(before: int) -> int:
        followers[before] = followers.get(before, -1) + 1
        places.append((before, followers[before]))
        return len(places) - 1

    rows: list[tuple[int, ...]] = []
    for line in trace.lines:
        before, row = -1, []
        for block_id in line.hash_ids or (None,) * -(-line.input_length // trace.block):
            if block_id is None:
                before = new(before)
            else:
                key = (before, block_id)
                if key not in numbers:
                    numbers[key] = new(before)
                before = numbers[key]
            row.append(before)
        rows.append(tuple(row))
    return rows, places


class TracePrompts:
    """A maker of the prompts of a trace's requests, from token ids below `vocabulary`.

    Prompts are equal as far as their leading ids are, and differ from there on: blocks that follow
    the same block begin with different tokens. If more blocks follow the same block than token ids
    exist, they differ in their first two tokens (or three, ...). All other tokens are random.
    """

    def __init__(self, trace: Trace, seed: str, vocabulary: int) -> None:
        """Number the trace's blocks, from which prompts are made.

        Raises:
            ValueError: the vocabulary is below two tokens.
        """
        if vocabulary < 2:
            raise ValueError(f"vocabulary is {vocabulary}; allowed: at least 2 tokens")
        self._rows, self._places = number_blocks(trace)
        self._lengths = [line.input_length for line in trace.lines]
        self._block = trace.block
        self._vocabulary = vocabulary
        most = max(follower for _, follower in self._places) + 1
        # Digits of a follower's number in base `vocabulary`.
        self._digits = 1
        while vocabulary**self._digits < most:
            self._digits += 1
        self._key = named_generator(seed).integers(0, 2**63, dtype=np.uint64)

    def __call__(self, index: int) -> list[int]:
        """Return the prompt of request `index`."""
        numbers = np.array(self._rows[index], np.uint64)
        places = np.arange(self._block, dtype=np.uint64)
        tokens = mix(self._key + numbers[:, None] * np.uint64(self._block) + places)
        tokens %= np.uint64(self._vocabulary)
        befores, followers = np.array([self._places[number] for number in self._rows[index]]).T
        shifts = mix(self._key - befores.astype(np.uint64)) >> np.uint64(1)
        for digit in range(min(self._digits, self._block)):
            tokens[:, digit] = (followers + shifts.astype(np.int64)) % self._vocabulary
            followers = followers // self._vocabulary
        prompt: list[int] = tokens.ravel()[: self._lengths[index]].tolist()
        return prompt


def mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a pseudo-random 64-bit number for each input, by SplitMix64's output function.

    Any block can be made without the blocks before it, and a whole prompt in one vectorised call.
    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    z = numbers * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def trace_words(trace: Trace, seed: str) -> Callable[[int], str]:
    """Return a function that makes each prompt of a trace from common words, one per token."""
    tokens = TracePrompts(trace, seed, len(WORDS))
    return lambda index: " ".join([WORDS[k] for k in tokens(index)])


def trace_note(trace: Trace, speed: float) -> str:
    """Return a line with the trace's size and its share of repeated prefixes."""
    stamps = len({line.timestamp for line in trace.lines})
    return (
        f"trace: {len(trace)} requests at {stamps} stamps over {trace.duration_s / speed:.1f} s "
        f"(speed {speed:g}); {trace.repeated_share:.1%} of the prompt tokens repeat a prefix"
    )
