"""A connector for `benchmarks.slices` whose cost is known: it uses the CPU in every step."""

# The base class belongs to vLLM's environment, which the type checker of this package cannot see.
# mypy: disable-error-code="misc"

import time
from typing import Any

from connector_tax.vllm.noop_connector import NoOpConnector


class SlowConnector(NoOpConnector):
    """A no-op connector that uses the scheduler's CPU for `spin_us` microseconds in each step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._spin_ns = round(1000 * extra["spin_us"])

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Spin, since a sleep would last longer; the scheduler calls this once in a step."""
        end_ns = time.perf_counter_ns() + self._spin_ns
        while time.perf_counter_ns() < end_ns:
            pass
        return super().build_connector_meta(scheduler_output)
