"""Read configuration files: parse, fill in defaults, check, and report errors precisely.

Each file has a JSON schema in workflow/schemas/, generated from the declarations of its fields
(docs/fields.py). Keys with a default are optional; unknown keys are rejected. An error names the
file, the key's path, the value found and what is allowed, and is raised before anything is started.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from connector_tax.artifacts.checks import CHECKS, SCRAPE_GAPS
from connector_tax.artifacts.looks import first_look
from connector_tax.artifacts.metrics import (
    ALL_METRICS,
    CRITERIA,
    GOODPUT_LATENCIES,
    METRICS,
    THROUGHPUT_METRICS,
)
from connector_tax.artifacts.names import PHASE_RULES, PHASES, baseline_of, members_of
from connector_tax.artifacts.record_reader import clipped, join, meant, offences
from connector_tax.foreign import is_secret, names_secret

if TYPE_CHECKING:
    from connector_tax.artifacts.study_records import (
        ConfigurationEntry,
        EngineSection,
        StudyConfig,
    )

_FOLDER = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (_FOLDER / "workflow" / "Snakefile").is_file()
# The project's folder; for an installed package the working directory.
ROOT = _FOLDER if IS_CHECKOUT else Path.cwd()
SCHEMAS = Path(__file__).with_name("schemas")
DEFAULTS = Path(__file__).with_name("defaults")

_ENTRY = {"$ref": "#/$defs/ConfigurationEntry"}


# Most values of a configuration, counting aliases repeatedly; the largest shipped one has 400.
MOST_VALUES, MOST_DEPTH = 20_000, 40
# Most bytes of a file; the largest shipped one has 6,000.
MOST_BYTES = 262_144
# Largest number by the suffix of its key: a million requests/s, a week, any other.
MOST = {"_rps": 1e6, "_s": 604_800.0, "": float(1 << 63)}
# Most requests of a cell; each takes about 2 kB in the load generator.
MOST_REQUESTS = 2_000_000
# The metrics that `statistics.judged` and `statistics.margins` may name.
JUDGEABLE = (*METRICS, *THROUGHPUT_METRICS)


class ConfigError(Exception):
    """A configuration is unusable; the text names file, key, found value and allowed values."""


class _Loader(yaml.CSafeLoader):
    """A safe loader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if (name := str(key.value)) in lines:
                raise yaml.MarkedYAMLError(
                    problem=f"found key {name!r} a second time, first on line {lines[name]}",
                    problem_mark=key.start_mark,
                )
            lines[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


def load_yaml(path: Path) -> Any:
    """Parse a YAML file with the safe loader.

    Raises:
        ConfigError: the file is missing, too large, no YAML, expands to too many values, has a key
            twice, or holds a value that JSON has no form for; one line names file and place.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: found no regular file; allowed: a YAML file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path}: found more than {MOST_BYTES:,} bytes; allowed: fewer")
        text = content.decode()
        _refuse_expansion(text, path)
        value = _Loader(text).get_single_data()
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{clipped(str(path))}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f"line {mark.line + 1}: " if mark else ""
        problem = clipped(str(error.problem))
        raise ConfigError(f"{path}: {line}not valid YAML: {problem}") from None
    # Numbers and dates that cannot be converted, and paths with a NUL, are a ValueError.
    except (yaml.YAMLError, ValueError) as error:
        problem = clipped(str(error))
        raise ConfigError(f"{clipped(str(path))}: not valid YAML: {problem}") from None
    if isinstance(value, dict) and "__use_yte__" in value:
        raise ConfigError(
            f"{path}: __use_yte__: found a key that makes Snakemake run code of this file; allowed:"
            " plain YAML"
        )
    refuse_unbounded(value, str(path))
    return value


def _too_large(place: str) -> ConfigError:
    return ConfigError(
        f"{place}: found more than {MOST_VALUES:,} values or {MOST_DEPTH} levels, counting what"
        " aliases name; allowed: fewer"
    )


def _refuse_expansion(text: str, path: Path) -> None:
    """Check how many values a YAML text makes, before the loader copies what aliases name.

    Raises:
        ConfigError: there are too many values or levels, or an alias lies inside what it names.
        yaml.YAMLError: the text is not YAML.
    """
    sizes: dict[str | None, int] = {}
    # Number of values so far and the anchor, for each open level.
    levels: list[tuple[int, str | None]] = [(0, None)]
    for event in yaml.parse(text, yaml.CSafeLoader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        anchor: str | None = getattr(event, "anchor", None)
        size = 0
        if isinstance(event, yaml.CollectionStartEvent):
            levels.append((1, anchor))
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = levels.pop()
            sizes[anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == outer for _, outer in levels):
                raise ConfigError(
                    f"{path}: line {line}: found alias *{clipped(str(anchor))} inside the value"
                    " that it names; allowed: an alias of another value"
                )
            # The loader refuses an unknown anchor.
            size = sizes.get(anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            size = sizes[anchor] = 1
        within, outer = levels[-1]
        levels[-1] = within + size, outer
        if within + size > MOST_VALUES or len(levels) > MOST_DEPTH:
            raise _too_large(f"{path}: line {line}")


def refuse_unbounded(given: Any, source: str) -> None:
    """Check that a configuration has a plausible size, and that JSON can hold its values.

    Raises:
        ConfigError: there are too many values or levels, a value or key is a date, bytes or a set,
            or a number is not finite or too large; names the key, the value and what is allowed.
    """
    waiting, values = [("", "", given, 0)], 0
    while waiting:
        where, name, value, depth = waiting.pop()
        values += 1
        if values > MOST_VALUES or depth > MOST_DEPTH:
            raise _too_large(f"{source}: {where[:80]}")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if not isinstance(key, str | int | float | None):
                    raise ConfigError(
                        f"{source}: {where or 'the file'}: found key {clipped(str(key))};"
                        f" allowed: text, in quotes where YAML reads a {type(key).__name__}"
                    )
                waiting.append((join(where, clipped(str(key))), str(key), inner, depth + 1))
        elif isinstance(value, list):
            waiting += ((f"{where}[{k}]", name, item, depth + 1) for k, item in enumerate(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            most = next((most for ending, most in MOST.items() if name.endswith(ending)), MOST[""])
            if not abs(value) <= most:
                raise ConfigError(
                    f"{source}: {where}: found {clipped(str(value))}; allowed: a number of at most"
                    f" {most:g}"
                )
        elif not isinstance(value, str | bool | None):
            raise ConfigError(
                f"{source}: {where or 'the file'}: found {clipped(str(value))}, which YAML reads as"
                f" {type(value).__name__}; allowed: text, in quotes, a number, true, false or null"
            )


def shipped(name: str) -> Path:
    """Return the file `name` below the working directory, or the package's copy of `config/...`."""
    path = Path(name)
    if path.parts[:1] != ("config",) or ".." in path.parts or path.exists():
        return path
    shipped_path = DEFAULTS.joinpath(*path.parts[1:])
    return shipped_path if shipped_path.exists() else path


@cache
def schema_of(name: str) -> dict[str, Any]:
    """Return workflow/schemas/<name>.schema.json, with references resolved."""
    schema: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text("utf-8"))
    if name == "config":
        bounds = (bounds for check in CHECKS.values() for bounds in check.bounds.items())
        for section, key, known in (
            ("StudyConfig", "validity", bounds),
            ("StudyConfig", "saturation", ((c.bound, c) for c in CRITERIA.values())),
            ("StatisticsSection", "margins", ((m, ALL_METRICS[m]) for m in JUDGEABLE)),
        ):
            properties = {known_key: declared.schema() for known_key, declared in known}
            closed = {"properties": properties, "additionalProperties": False}
            schema["$defs"][section]["properties"][key] |= closed
    return schema


def filled(value: Any, name: str, node: Mapping[str, Any] | None = None) -> Any:
    """Return a copy of `value` with a schema's defaults for the keys that it lacks.

    Args:
        node: the part of the schema for `value`; by default the whole schema.
    """
    node = schema_of(name) if node is None else node
    if "$ref" in node:
        node = schema_of(name)["$defs"][node["$ref"].rpartition("/")[2]]
    if isinstance(value, list) and isinstance(node.get("items"), dict):
        return [filled(item, name, node["items"]) for item in value]
    if not isinstance(value, Mapping) or "properties" not in node:
        return copy.deepcopy(value)
    known: Mapping[str, Any] = node["properties"]
    given = {key: child["default"] for key, child in known.items() if "default" in child}
    return {
        key: filled(inner, name, known.get(key, {})) for key, inner in {**given, **value}.items()
    }


# Removed key of a study file -> what to do instead.
REMOVED_KEYS = {
    "quiet": "every cell is watched, and nothing beside it is measured",
    "rehearsal.archive": "name rehearsal.accelerator and model_config, or leave `rehearsal` out",
    "engine.device_time.sweep_us": "each step takes the time that the roofline gives",
    "rehearsal.launch": "name rehearsal.accelerator and model_config, or leave `rehearsal` out",
}


def _refuse_removed(config: Any, source: str) -> None:
    for key, instead in REMOVED_KEYS.items():
        *sections, last = key.split(".")
        part = config
        for name in sections:
            part = part.get(name) if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and last in part:
            raise ConfigError(f"{source}: {key}: removed; {instead}")


def validate(value: Any, schema_name: str, source: str) -> None:
    """Check `value` (read from `source`) against workflow/schemas/<schema_name>.schema.json.

    Raises:
        ConfigError: one line for each error: `source: key.path: found ..., allowed ...`.
    """
    if schema_name == "config":
        _refuse_removed(value, source)
    if lines := offences(value, schema_of(schema_name)):
        raise ConfigError("\n".join(f"{source}: {line}" for line in lines))


def refuse_secrets(value: Any, source: str) -> None:
    """Check that a configuration contains no secret, since it is recorded and published.

    Raises:
        ConfigError: a line for each value that looks like a secret, without the value.
    """
    places = [where for where, name, leaf in _leaves(value, "", "") if is_secret(name, leaf)]
    if places:
        raise ConfigError(
            "\n".join(
                f"{source}: {where}: found what looks like a secret (not shown); allowed: none,"
                " since a configuration is published; set it in the environment of the run"
                for where in dict.fromkeys(places)
            )
        )


def _leaves(value: Any, where: str, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of each value in YAML, and in JSON texts within it."""
    if isinstance(value, str) and value.startswith(("{", "[")):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        for key, inner in value.items():
            secret_name = name if names_secret(name) else str(key)
            yield from _leaves(inner, join(where, str(key)), secret_name)
    elif isinstance(value, list):
        before = ""
        for position, inner in enumerate(value):
            # The item after `--name` of a command is its value.
            secret_name = before if before.startswith("-") else name
            yield from _leaves(inner, f"{where}[{position}]", secret_name)
            before = str(inner)
        if value and all(isinstance(item, str) for item in value):
            yield where, "", " ".join(value)
    else:
        yield where, name, value


def load_configurations(path: Path) -> dict[str, ConfigurationEntry]:
    """Return the connector configurations of `path` by id, in file order.

    Raises:
        ConfigError: schema errors, a duplicate id, or an undefined child.
    """
    value = load_yaml(path)
    refuse_secrets(value, str(path))
    validate(value, "configurations", str(path))
    return with_entries(value["configurations"], {}, f"{path}: configurations")


def with_entries(
    entries: Sequence[ConfigurationEntry], known: Mapping[str, ConfigurationEntry], source: str
) -> dict[str, ConfigurationEntry]:
    """Return `known` and the entries with defaults filled in, by id.

    Raises:
        ConfigError: a duplicate id, or an undefined child.
    """
    by_id = dict(known)
    for position, entry in enumerate(entries):
        if entry["id"] in by_id:
            where = f"{source}[{position}].id"
            raise ConfigError(f"{where}: found {entry['id']!r} twice; ids must be unique")
        absent = {
            "label": entry["id"].replace("_", " "),
            "role": None if entry["connector"] is None else "kv_both",
        }
        by_id[entry["id"]] = absent | filled(entry, "configurations", _ENTRY)
    for entry in entries:
        for child in by_id[entry["id"]]["children"]:
            if child not in by_id or by_id[child]["children"] or child == entry["id"]:
                raise ConfigError(
                    f"{source}: {entry['id']}.children: found {child!r}; "
                    f"allowed: {', '.join(i for i, e in by_id.items() if not e['children'])}"
                )
    return by_id


def check_study(given: Mapping[str, Any], source: str, known: Sequence[str]) -> StudyConfig:
    """Check one study's configuration by its schema, and by rules beyond the schema.

    Args:
        given: the merged configuration from Snakemake or a test; it is not changed.
        source: the file name(s) for errors.
        known: the configuration ids of config/configurations.yaml; the study's own `connectors` are
            also allowed.

    Returns:
        The configuration with defaults filled in.

    Raises:
        ConfigError: names the key, the value found and what is allowed.
    """
    refuse_unbounded(given, source)
    refuse_secrets(given, source)
    # Snakemake passes ordered dictionaries.
    plain = json.loads(json.dumps(given))
    validate(plain, "config", source)
    config = cast("StudyConfig", filled(plain, "config"))
    # `with_entries` fills in their defaults on use; study.json has them as given.
    if "connectors" in plain:
        config["connectors"] = plain["connectors"]
    _check_choices(config, source)
    baseline = baseline_of(config)
    known = [*known, *(entry["id"] for entry in config.get("connectors", []))]
    for key, ids in (
        ("configurations", config["configurations"]),
        *(
            (f"{PHASE_RULES[p]}.configurations", members_of(config, p))
            for p in PHASES[1:]
            if PHASE_RULES[p] in config
        ),
    ):
        allowed = known if key == "configurations" else config["configurations"]
        if baseline not in ids:
            raise ConfigError(
                f"{source}: {key}: found {ids}; allowed: a list that contains {baseline!r}, the"
                " baseline of all taxes"
            )
        for position, identifier in enumerate(ids):
            if identifier not in allowed:
                raise ConfigError(
                    f"{source}: {key}[{position}]: found {identifier!r};"
                    f"{meant(identifier, allowed)} allowed: {', '.join(allowed)}"
                )
    # A study in virtual time may have only the baseline.
    if len(config["configurations"]) < 2:
        raise ConfigError(
            f"{source}: configurations: found {config['configurations']}; allowed: at least 2 items"
        )
    rates = config["phase_a"]["rates_rps"]
    if rates != sorted(rates):
        raise ConfigError(f"{source}: phase_a.rates_rps: found {rates}; allowed: ascending rates")
    cell = config["cell"]
    if cell["cap_s"] < cell["floor_s"]:
        raise ConfigError(
            f"{source}: cell.cap_s: found {cell['cap_s']}; "
            f"allowed: at least cell.floor_s ({cell['floor_s']})"
        )
    _check_extent(config, source)
    interval_s, longest = config["metrics"]["interval_s"], max(SCRAPE_GAPS)
    if longest * interval_s > cell["floor_s"]:
        raise ConfigError(
            f"{source}: metrics.interval_s: found {interval_s}; allowed: at most cell.floor_s / "
            f"{longest} ({cell['floor_s'] / longest:.3g}), else a cell may hold no scrape"
        )
    generator = config["load_generator"]
    connections = generator["workers"] * generator["connections_per_worker"]
    if connections < cell["inflight_cap"]:
        raise ConfigError(
            f"{source}: load_generator.connections_per_worker: found "
            f"{generator['connections_per_worker']}; allowed: workers x connections_per_worker "
            f"({connections}) must be at least cell.inflight_cap ({cell['inflight_cap']}), else "
            "requests queue inside the client"
        )
    return config


def _check_extent(config: StudyConfig, source: str) -> None:
    """Check that a cell fits into memory, and that the study takes at most a week."""
    cell, rates = config["cell"], config["phase_a"]["rates_rps"]
    most_rps = MOST_REQUESTS / cell["cap_s"]
    if rates[-1] > most_rps:
        raise ConfigError(
            f"{source}: phase_a.rates_rps: found {rates[-1]:g}; allowed: at most {most_rps:.4g}"
            f" with cell.cap_s {cell['cap_s']:g}, which is {MOST_REQUESTS:,} requests in a cell"
        )
    grid, load = config.get("phase_b"), config.get("phase_bp")
    cells_of_launch = {
        "A": len(rates),
        "B": len(grid["input_tokens"]) * len(grid["output_tokens"]) if grid else 0,
        "Bp": len(load["shapes"]) if load else 0,
    }
    launches = cells = 0
    for phase, number in cells_of_launch.items():
        if number:
            of_phase = config["blocks"] * len(members_of(config, phase))
            launches += of_phase
            cells += of_phase * number
    week_s = MOST["_s"] * max(1, len(config.get("devices", [])))
    cell_s = cell["warmup_s"] + cell["floor_s"]
    least_s = launches * config["resources"]["idle_s"] + cells * cell_s
    if least_s > week_s:
        raise ConfigError(
            f"{source}: cell.floor_s: found {cell['floor_s']:g} for {cells:,} cells in {launches}"
            f" launches, with warmup_s and resources.idle_s at least {least_s / 86400:,.1f} days;"
            " allowed: a week in all"
        )


def _check_choices(config: StudyConfig, source: str) -> None:
    """Check keys that are only allowed with certain values of other keys."""
    process, shape = config["arrivals"]["process"], config["arrivals"]["gamma_shape"]
    if (process == "gamma") != (shape is not None):
        allowed = (
            "a number > 0 with process gamma" if process == "gamma" else f"null with {process}"
        )
        raise ConfigError(f"{source}: arrivals.gamma_shape: found {shape}; allowed: {allowed}")
    looks, blocks = config["statistics"].get("looks"), config["blocks"]
    first = first_look(config["statistics"])
    wanted = blocks - first + 1
    if looks is None and "first_look" in config["statistics"]:
        raise ConfigError(f"{source}: statistics.first_look: found without statistics.looks")
    if looks is not None and (len(looks) != wanted or "devices" in config):
        given = "`devices`" if "devices" in config else f"{len(looks)} levels"
        raise ConfigError(
            f"{source}: statistics.looks: found {given} and {blocks} blocks; allowed: a level for"
            f" each block from number {first} on ({wanted}), and no `devices`"
        )
    unknown = [m for m in config["statistics"].get("judged", []) if m not in JUDGEABLE]
    if unknown:
        raise ConfigError(
            f"{source}: statistics.judged: found {unknown[0]!r}; allowed: {', '.join(JUDGEABLE)}"
        )
    if "goodput" in config["statistics"].get("judged", []) and not config["statistics"].get(
        "goodput"
    ):
        raise ConfigError(
            f"{source}: statistics.judged: found goodput without statistics.goodput; allowed: with"
            f" limits in ms of {', '.join(GOODPUT_LATENCIES)}"
        )
    if "concurrency" in config["phase_a"] and config["engine"]["kind"] != "command":
        raise ConfigError(
            f"{source}: phase_a.concurrency: found {config['phase_a']['concurrency']}; allowed:"
            " in studies of `connector-tax ab`"
        )
    spent, whole = math.fsum(looks or ()), 1 - config["statistics"]["confidence"]
    if spent > whole and not math.isclose(spent, whole):
        raise ConfigError(
            f"{source}: statistics.looks: found levels that add up to {spent:g}; allowed: up to"
            f" 1 - statistics.confidence ({whole:g})"
        )
    machine = config.get("rehearsal")
    if machine is not None and not {"accelerator", "model_config"} <= machine.keys():
        raise ConfigError(
            f"{source}: rehearsal: found {', '.join(machine) or 'nothing'}; allowed: accelerator"
            " and model_config"
        )


def pythons_of(engine: EngineSection) -> list[str]:
    """Return the interpreters of the configurations' servers, first the engine's interpreter."""
    sections = (engine, *engine.get("forms", {}).values())
    return list(dict.fromkeys(section["python"] for section in sections if "python" in section))


def is_fetched(engine: EngineSection) -> bool:
    """Return whether the model is a hub name to fetch, not a folder of this machine."""
    model = engine.get("model", "./")
    return not (model.startswith("./") or Path(model).is_absolute())
