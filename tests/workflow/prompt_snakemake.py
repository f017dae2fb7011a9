"""Run `snakemake` with an executor that asks Slurm every second.

The executor by itself waits ten seconds longer after each check in which no job has ended.
"""

import asyncio

from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor


async def _sleep(_: RemoteExecutor) -> None:
    await asyncio.sleep(1)


if __name__ == "__main__":
    RemoteExecutor.sleep = _sleep
    main()
