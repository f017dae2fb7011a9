"""How many requests are in flight in all workers, and the cap on them, in shared memory.

A worker that checks a count and then raises it lets one request too many through for each other
worker that does so in between. A process-shared POSIX semaphore, sem_overview(7), takes a free
place or finds none in a single step, without a system call and on every architecture. The counts
beside it say how many places each worker holds, since one that dies does not give them back.
"""

import ctypes
import mmap
import os

# More than any C library's sem_t, which has 32 bytes in glibc and in musl.
_SEMAPHORE_BYTES = 64
_SEM_VALUE_MAX = 2**31 - 1

# PyDLL: the calls never block, so the interpreter lock need not be let go, which would cost more.
_libc = ctypes.PyDLL(None)
_sem_init, _sem_trywait, _sem_post = _libc.sem_init, _libc.sem_trywait, _libc.sem_post
_sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
_sem_trywait.argtypes = _sem_post.argtypes = (ctypes.c_void_p,)


def shared_memory(workers: int) -> int:
    """A descriptor of the memory that `InFlight` shares among `workers` processes."""
    descriptor = os.memfd_create("loadgen-inflight")
    os.ftruncate(descriptor, _SEMAPHORE_BYTES + 8 * workers)
    return descriptor


class InFlight:
    """One process's view of the requests in flight.

    At every instant the counts add up to no more than the cap: a request is counted once it has its
    place, and no longer counted before it gives it back.
    """

    def __init__(self, descriptor: int, workers: int) -> None:
        self._memory = mmap.mmap(descriptor, _SEMAPHORE_BYTES + 8 * workers)
        self._semaphore = (ctypes.c_char * _SEMAPHORE_BYTES).from_buffer(self._memory)
        self._address = ctypes.addressof(self._semaphore)
        with memoryview(self._memory) as whole, whole[_SEMAPHORE_BYTES:] as counts:
            self._counts = counts.cast("q")

    def limit(self, cap: int) -> None:
        """Allow `cap` requests in flight, those that already are among them; 0: any number."""
        free = max(0, (cap or _SEM_VALUE_MAX) - self.count())
        _sem_init(self._address, 1, free)

    def count(self) -> int:
        """Requests in flight in all workers, read one worker after the other."""
        return sum(self._counts)

    def enter(self, worker: int) -> bool:
        """Count a request of `worker` as in flight; False, and not counted, at the cap."""
        if _sem_trywait(self._address) != 0:
            return False
        self._counts[worker] += 1
        return True

    def leave(self, worker: int) -> None:
        """A request that entered is over."""
        self._counts[worker] -= 1
        _sem_post(self._address)

    def forget_worker(self, worker: int) -> None:
        """Every request of a worker that died is over.

        If it died between its place and its count, that place is lost until the next `limit`.
        """
        while self._counts[worker] > 0:
            self.leave(worker)

    def close(self) -> None:
        """Unmap the memory."""
        self._counts.release()
        del self._semaphore
        self._memory.close()
