"""Let MooncakeConnector start without an accelerator; used only by the CPU study.

In its constructor and in each sender thread, vLLM 0.32's MooncakeConnector queries torch for the
current accelerator's index and selects it through the platform. Without an accelerator both calls
raise. This plugin makes them return 0 and do nothing. It changes nothing else, is inactive if torch
finds an accelerator, and is on the PYTHONPATH of every configuration of a CPU study.
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
    """Do nothing, since there is no device to select."""
