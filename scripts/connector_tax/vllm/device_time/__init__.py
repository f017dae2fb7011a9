# CONNECTOR_TAX_PATCH
"""An emulated device for a real vLLM: the host path runs, the device's time is only waited for.

Loaded by vLLM as a `vllm.general_plugins` entry point from the overlay folder of the step probe
(connector_tax.vllm.overlay); no file of vLLM changes. Active if CONNECTOR_TAX_DEVICE_TIME names a
JSON file of coefficients (connector_tax.roofline:Roofline.coefficients). It writes
`<prefix>.device.steps` in the step probe's format, one step once the host has waited for it. An
incompatible vLLM ends with an error that names what is missing.

The device computes nothing: no kernel, no token, no memory traffic. The emulation shows how much of
the host's work delays steps of this length, and nothing about layouts or graphs. Copies to the host
take assumed times.
"""

import json
import logging
import os
from pathlib import Path

VARIABLE = "CONNECTOR_TAX_DEVICE_TIME"
PREFIX_VARIABLE = "AGENTIC_STEP_LOG_PATH"

_LOG = logging.getLogger("vllm.connector_tax_device_time")
_installed = False


def register() -> None:
    """Install the emulated device if coefficients are given; vLLM's plugin entry point."""
    global _installed
    path = os.environ.get(VARIABLE)
    if not path or _installed:
        return
    _installed = True
    # Imported late, since it is not needed without coefficients.
    from .patches import install

    coefficients = json.loads(Path(path).read_text(encoding="utf-8"))
    install(coefficients, str(Path(os.environ[PREFIX_VARIABLE]).resolve()))
    _LOG.info("connector_tax device time emulated: %s", coefficients["accelerator"])
