"""Open-loop load generator for OpenAI-compatible endpoints, stamped where the bytes arrive."""

from connector_tax.loadgen.affinity import (
    AffinityPlan,
    Topology,
    plan_affinity,
    read_topology,
)
from connector_tax.loadgen.arrivals import ArrivalKind, make_offsets
from connector_tax.loadgen.cell import CellRule, PlannedRequest, Progress
from connector_tax.loadgen.dispatcher import LoadGeneratorError
from connector_tax.loadgen.generator import (
    CellResult,
    LoadGenerator,
    LoadGeneratorOptions,
    Target,
)
from connector_tax.loadgen.messages import FAILURES, RequestRecord
from connector_tax.loadgen.precision import HalfWidths, PrecisionRule

__all__ = [
    "FAILURES",
    "AffinityPlan",
    "ArrivalKind",
    "CellResult",
    "CellRule",
    "HalfWidths",
    "LoadGenerator",
    "LoadGeneratorError",
    "LoadGeneratorOptions",
    "PlannedRequest",
    "PrecisionRule",
    "Progress",
    "RequestRecord",
    "Target",
    "Topology",
    "make_offsets",
    "plan_affinity",
    "read_topology",
]
