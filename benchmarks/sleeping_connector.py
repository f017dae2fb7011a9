"""The no-op connector with two hooks that sleep, for the benchmark `host_work`.

`build_connector_meta` runs in the scheduler, before a step is launched; `get_transfer_results` in
the worker, after it. For how long each sleeps stands in a file of two doubles (us), named by the
connector's extra configuration, that the benchmark writes between requests.
"""

# mypy: disable-error-code="misc"

import mmap
import struct
import time
from pathlib import Path
from typing import Any

from connector_tax.vllm.noop_connector import NoOpConnector

SLEEPS = struct.Struct("2d")


class SleepingConnector(NoOpConnector):
    """Sleeps before a step's launch, after it, or not at all."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        path = vllm_config.kv_transfer_config.kv_connector_extra_config["sleeps"]
        with Path(path).open("r+b") as stream:
            self._sleeps = mmap.mmap(stream.fileno(), SLEEPS.size)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        time.sleep(SLEEPS.unpack_from(self._sleeps)[0] / 1e6)
        return super().build_connector_meta(scheduler_output)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        time.sleep(SLEEPS.unpack_from(self._sleeps)[1] / 1e6)
        return super().get_transfer_results(finished_req_ids)
