"""Read the engine's configuration file: check it against its schema and return frozen values."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from connector_tax.artifacts.study_records import Count, Text, meta
from connector_tax.config import ConfigError, load_yaml, validate
from connector_tax.engine.connectors import ConnectorTax
from connector_tax.engine.faults import FaultPlan, FaultsSection
from connector_tax.engine.model import StepCost
from connector_tax.engine.scheduler import Scheduler, SchedulerOptions


@dataclass(frozen=True)
class ModelOptions:
    """The emulated model."""

    served_name: Text  #: name the server gives the model
    max_model_len: Count  #: most tokens of prompt and output together
    vocab_size: Annotated[int, meta(ge=2, le=1_000_000)]  #: token ids are 0 to vocab_size - 1


class EngineFile(TypedDict):
    """config/embedded.yaml: step cost, connector taxes and faults of the embedded engine."""

    label: Text  #: description of the values
    model: ModelOptions
    scheduler: SchedulerOptions
    step_cost: StepCost
    #: taxes by configuration; null: an engine without a connector
    connectors: Annotated[dict[str, ConnectorTax | None], meta(min_length=1)]
    faults: NotRequired[FaultsSection]


@dataclass(frozen=True)
class EngineConfig:
    """The values of an engine file for one configuration; `tax` is None without a connector."""

    configuration: str
    model: ModelOptions
    scheduler: SchedulerOptions
    step_cost: StepCost
    tax: ConnectorTax | None
    faults: FaultPlan


def load_config(path: Path, configuration: str) -> EngineConfig:
    """Read `path` (YAML or JSON) for one configuration id; errors as in `config_of`."""
    return config_of(load_yaml(path), configuration, str(path))


def config_of(value: Any, configuration: str, source: str) -> EngineConfig:
    """Return the content of an engine file, read from `source`, for one configuration id.

    Raises:
        ConfigError: the schema is violated, or the file does not define the id; names source, key
            path, the value found and what is allowed.
    """
    validate(value, "embedded", source)
    connectors = value["connectors"]
    if configuration not in connectors:
        raise ConfigError(
            f"{source}: connectors: found no configuration {configuration!r}; "
            f"allowed: {', '.join(connectors)}"
        )
    tax = ConnectorTax(**connectors[configuration]) if connectors[configuration] else None
    model = ModelOptions(**value["model"])
    limits = value["scheduler"]
    if tax is not None:
        limits = limits | {"kv_blocks": int(limits["kv_blocks"] * tax.kv_capacity_fraction)}
    scheduler = SchedulerOptions(**limits)
    try:
        Scheduler(scheduler, model.max_model_len)
    except ValueError as error:
        raise ConfigError(f"{source}: scheduler.{error}") from error
    return EngineConfig(
        configuration=configuration,
        model=model,
        scheduler=scheduler,
        step_cost=StepCost(**value["step_cost"]),
        tax=tax,
        faults=FaultPlan(value.get("faults")),
    )
