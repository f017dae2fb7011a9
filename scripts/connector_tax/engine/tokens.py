"""The emulated vocabulary: token i is the word `wi`; text is split at white space.

Output tokens follow from the prompt alone, so the same prompt always gets the same text.
"""

from array import array
from collections.abc import Sequence
from zlib import crc32

TOKEN_BYTES = array("I").itemsize
# Odd, so that successive tokens of one output walk through a vocabulary of any even size.
_STRIDE = 2_654_435_761
_EOS_SPREAD = 256


class Vocabulary:
    """Words and their ids."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._words = [b" w%d" % i for i in range(size)]

    def tokenize(self, text: str) -> list[int]:
        """One id for each word; a word that is none of the vocabulary's own is hashed."""
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        if word.startswith("w") and word[1:].isascii() and word[1:].isdigit():
            number = int(word[1:])
            if number < self.size:
                return number
        return crc32(word.encode()) % self.size

    def output_word(self, seed: int, position: int) -> bytes:
        """The word at `position` of the output for a prompt with this seed; plain ASCII."""
        return self._words[(seed + position * _STRIDE) % self.size]

    def outside(self, ids: Sequence[int]) -> int | None:
        """An id that is none of the vocabulary's, if there is one."""
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < self.size:
                return extreme
        return None


def prompt_bytes(ids: Sequence[int]) -> bytes:
    """The ids as bytes, `TOKEN_BYTES` each."""
    return array("I", ids).tobytes()


def natural_length(seed: int) -> int:
    """Tokens until the emulated model would emit its end-of-sequence token."""
    return 16 + seed % _EOS_SPREAD
