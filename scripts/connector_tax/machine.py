"""What a number was measured on: the processor, the kernel, the versions, the load."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def cpu() -> str:
    """The processor's name, and how many of its CPUs this process may use."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    name = names[0] if names else platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs usable of {os.cpu_count()}"


def machine(*packages: str) -> str:
    """One line to stand above a table: processor, kernel, Python, `packages`, load averages.

    Raises:
        importlib.metadata.PackageNotFoundError: a package is not installed.
    """
    versions = "".join(f", {name} {version(name)}" for name in packages)
    one, five, _ = os.getloadavg()
    return (
        f"{cpu()}, Linux {platform.release()}, Python {platform.python_version()}{versions}; "
        f"load average {one:.1f} (1 min) {five:.1f} (5 min)"
    )
