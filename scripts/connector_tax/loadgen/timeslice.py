"""A short time slice, for a process that has little to do and must do it at once when it wakes.

From Linux 6.12 on the fair scheduler takes a slice for each task (sched_setattr(2),
`sched_runtime`), and one with a shorter slice that wakes goes before the one that runs. It gets no
more of the processor than others, which a higher priority would take from them. Older kernels do
not note the number.
"""

import ctypes
import os
import platform

# sched_setattr and sched_getattr, which the C library has from glibc 2.41 on only.
_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_FAIR = (os.SCHED_OTHER, os.SCHED_BATCH)
_libc = ctypes.CDLL(None, use_errno=True)


class _SchedAttr(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    )


def set_time_slice(slice_ns: int) -> int:
    """Ask for slices of `slice_ns` (100 us to 100 ms) for this thread and those it starts.

    Its policy and nice value are kept; one that is not scheduled fairly, such as a real-time
    thread, has no slice.

    Returns:
        The slice in ns that the kernel has noted; 0 where it has none, refuses to change it, or
        its system call is not known here.
    """
    calls = _SYSCALLS.get(platform.machine())
    policy = os.sched_getscheduler(0)
    if calls is None or policy not in _FAIR:
        return 0
    size = ctypes.sizeof(_SchedAttr)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SchedAttr(size, policy, 0, nice, 0, slice_ns, 0, 0)
    if _libc.syscall(calls[0], 0, ctypes.byref(attributes), 0) != 0:
        return 0
    if _libc.syscall(calls[1], 0, ctypes.byref(attributes), size, 0) != 0:
        return 0
    return int(attributes.runtime_ns)
