"""Let MooncakeConnector start where there is no accelerator; used by the CPU study only.

vLLM 0.32's MooncakeConnector asks torch for the current accelerator's index and tells the platform
to select it, in its constructor and in each of its sender threads. Without an accelerator both
calls raise. This plugin makes them answer 0 and do nothing. It changes nothing else, does nothing
where torch finds an accelerator, and is on the path of every configuration of a CPU study alike.
"""

# mypy: disable-error-code="import-not-found"

import logging
from typing import Any

_LOG = logging.getLogger("vllm.connector_tax_cpu_adapter")


def register() -> None:
    """Install the adapter; vLLM loads it in every process."""
    import torch
    from vllm.platforms import current_platform

    if torch.accelerator.is_available():
        return
    torch.accelerator.current_device_index = lambda: 0
    type(current_platform).set_device = classmethod(_select_nothing)
    _LOG.info("connector_tax CPU adapter: no accelerator; device selection does nothing")


def _select_nothing(_platform: Any, _device: Any) -> None:
    """There is no device to select."""
