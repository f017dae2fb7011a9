"""Load generator for OpenAI-compatible endpoints, stamped where the bytes arrive."""

from connector_tax.loadgen.affinity import (
    AffinityPlan,
    Topology,
    plan_affinity,
    read_topology,
)
from connector_tax.loadgen.endpoint import Target
from connector_tax.loadgen.generator import (
    CellResult,
    Interrupted,
    LoadGenerator,
    LoadGeneratorOptions,
)
from connector_tax.loadgen.messages import FAILURES, LoadGeneratorError, RequestRecord
from connector_tax.loadgen.plan import Plan, Progress
from connector_tax.loadgen.rule import CellRule, PrecisionRule
from connector_tax.loadgen.sessions import (
    PlannedRequest,
    RandomPrompts,
    RandomTokens,
    RandomWords,
    RequestSource,
)
from connector_tax.loadgen.traffic import ArrivalKind, Load, make_offsets, open_loop

__all__ = [
    "FAILURES",
    "AffinityPlan",
    "ArrivalKind",
    "CellResult",
    "CellRule",
    "Interrupted",
    "Load",
    "LoadGenerator",
    "LoadGeneratorError",
    "LoadGeneratorOptions",
    "Plan",
    "PlannedRequest",
    "PrecisionRule",
    "Progress",
    "RandomPrompts",
    "RandomTokens",
    "RandomWords",
    "RequestRecord",
    "RequestSource",
    "Target",
    "Topology",
    "make_offsets",
    "open_loop",
    "plan_affinity",
    "read_topology",
]
