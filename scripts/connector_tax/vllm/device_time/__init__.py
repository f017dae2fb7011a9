# CONNECTOR_TAX_PATCH
"""An emulated device for a real vLLM: its host path runs, its device's time is waited for.

Loaded by vLLM as a `vllm.general_plugins` entry point from the overlay folder of the step probe
(connector_tax.vllm.overlay); no file of vLLM changes. Active where CONNECTOR_TAX_DEVICE_TIME names
a JSON file of coefficients (connector_tax.roofline:Roofline.coefficients). It writes
`<prefix>.device.steps` as the step probe writes its files: a step each, once the host has waited
for it. A vLLM that it does not fit ends with an error that names what is missing.

Nothing of a device is computed: no kernel, no token, no memory traffic. What can be learnt is what
of the host's work arrives where steps take this long; nothing of layouts, graphs or copies.
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
    """Replace the device where coefficients are given; vLLM's plugin entry point."""
    global _installed
    path = os.environ.get(VARIABLE)
    if not path or _installed:
        return
    _installed = True
    # Imported late: without coefficients nothing of it is needed.
    from .patches import install

    coefficients = json.loads(Path(path).read_text(encoding="utf-8"))
    install(coefficients, str(Path(os.environ[PREFIX_VARIABLE]).resolve()))
    _LOG.info("connector_tax device time emulated: %s", coefficients["accelerator"])
