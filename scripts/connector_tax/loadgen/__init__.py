"""Load generator for OpenAI-compatible endpoints; answers are stamped as their bytes arrive."""

from connector_tax.loadgen.generator import CellResult, LoadGenerator, LoadGeneratorOptions
from connector_tax.loadgen.messages import LoadGeneratorError, RequestRecord, Target
from connector_tax.loadgen.plan import CellRule, Plan, Progress, closed_loop, open_loop
from connector_tax.loadgen.sessions import (
    PlannedRequest,
    RequestSource,
    random_requests,
    random_tokens,
    random_words,
)
from connector_tax.loadgen.traffic import Load, make_offsets

__all__ = [
    "CellResult",
    "CellRule",
    "Load",
    "LoadGenerator",
    "LoadGeneratorError",
    "LoadGeneratorOptions",
    "Plan",
    "PlannedRequest",
    "Progress",
    "RequestRecord",
    "RequestSource",
    "Target",
    "closed_loop",
    "make_offsets",
    "open_loop",
    "random_requests",
    "random_tokens",
    "random_words",
]
