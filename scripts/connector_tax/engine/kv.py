"""KV blocks: a pool of fixed size, shared by running sequences and the prefix cache.

A block is free, held by a sequence, or idle: not held, but with its content in the prefix cache.
Idle blocks are reused, least recently used first. A prompt's full blocks enter the cache at the end
of its prefill, under a digest of the prompt up to the block's end; generated tokens do not enter
it.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b


def block_digests(prompt: bytes, token_bytes: int, block_size: int) -> list[bytes]:
    """Return a digest for each full block of `block_size` tokens, covering the prompt up to its
    end.
    """
    step = token_bytes * block_size
    chain = blake2b(digest_size=16)
    digests = []
    for end in range(step, len(prompt) + 1, step):
        chain.update(prompt[end - step : end])
        digests.append(chain.digest())
    return digests


@dataclass(slots=True)
class Holding:
    """The blocks of one sequence: digests of cached blocks, and the number of uncached blocks."""

    shared: list[bytes] = field(default_factory=list)
    uncached: int = 0

    @property
    def blocks(self) -> int:
        return len(self.shared) + self.uncached


class BlockPool:
    """The pool's state; every block is free, idle, or held (`free + idle + held == total`)."""

    def __init__(self, total: int, block_size: int, prefix_caching: bool) -> None:
        self.total = total
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._free = total
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._users: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Return the number of blocks that a sequence could take now."""
        return self._free + len(self._idle)

    @property
    def cached(self) -> int:
        """Return the number of blocks in the prefix cache, idle or in use."""
        return len(self._idle) + len(self._users)

    @property
    def usage(self) -> float:
        """Return the share of the pool that sequences hold."""
        return 1.0 - self.available / self.total

    def match(self, digests: Seq[bytes], prompt_len: int) -> int:
        """Return how many blocks at the prompt's start are cached, excluding its last token."""
        if not self._prefix_caching:
            return 0
        usable = (prompt_len - 1) // self.block_size
        hits = 0
        for digest in digests[:usable]:
            if digest not in self._users and digest not in self._idle:
                break
            hits += 1
        return hits

    def share(self, holding: Holding, digests: Seq[bytes]) -> None:
        """Assign these cached blocks to a sequence that holds none yet."""
        for digest in digests:
            self._idle.pop(digest, None)
            self._users[digest] = self._users.get(digest, 0) + 1
        holding.shared.extend(digests)

    def grow(self, holding: Holding, tokens: int) -> bool:
        """Give a sequence blocks for `tokens` tokens; return False, without a change, if too few
        exist.
        """
        missing = -(-tokens // self.block_size) - holding.blocks
        if missing > self.available:
            return False
        if missing > 0:
            evicted = max(0, missing - self._free)
            for _ in range(evicted):
                self._idle.popitem(last=False)
            self._free += evicted - missing
            holding.uncached += missing
        return True

    def publish(self, holding: Holding, digests: Seq[bytes]) -> None:
        """Add a prefilled prompt's full blocks to the cache."""
        if not self._prefix_caching:
            return
        for digest in digests[len(holding.shared) :]:
            if digest in self._users or digest in self._idle:
                # Another sequence computed the same prefix meanwhile; this copy stays private.
                break
            self._users[digest] = 1
            holding.shared.append(digest)
            holding.uncached -= 1

    def release(self, holding: Holding) -> None:
        """Take all blocks from a sequence; its cached blocks become idle, from last to first."""
        for digest in reversed(holding.shared):
            users = self._users[digest] - 1
            if users:
                self._users[digest] = users
            else:
                del self._users[digest]
                self._idle[digest] = None
        self._free += holding.uncached
        holding.shared = []
        holding.uncached = 0
