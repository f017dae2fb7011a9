"""Compare the resolved study of every shipped configuration with another revision's.

    python -m tests.oracle.resolved REVISION

Each configuration file, alone or laid over its bases, is resolved by the code and files of REVISION
and by those that lie here; ends with status 1 where one differs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from connector_tax.study.design import differences

ROOT = Path(__file__).resolve().parents[2]
BASES = ("config.yaml", "vllm-cpu.yaml", "h20.yaml", "h20-emulated.yaml")
# Run in a checkout of either revision, so it may name what both have, and nothing else.
RESOLVE = """
import itertools, json, sys
from pathlib import Path
import yaml
from snakemake.utils import update_config
from connector_tax.study.design import resolve

bases, files = json.loads(sys.argv[1])
stacks = [[base] for base in bases]
stacks += [[base, file] for base in bases for file in files]
documents = {}
for stack in stacks:
    config = {}
    try:
        for name in stack:
            update_config(config, yaml.safe_load(Path("config", name).read_text()))
        document = resolve(config, "it")
    except Exception as error:
        document = {"error": str(error)}
    documents[" ".join(stack)] = {
        k: v for k, v in document.items() if k not in ("created_utc", "package_version")
    }
print(json.dumps(documents))
"""


def resolved(checkout: Path, files: list[str]) -> dict[str, dict[str, Any]]:
    """Configuration files to the study document that the code of a checkout makes of them."""
    arguments = json.dumps([BASES, files])
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, arguments],
        cwd=checkout,
        env={"PYTHONPATH": str(checkout / "scripts"), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        check=True,
    )
    documents: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return documents


def main() -> int:
    """Compare, and say which configurations were and what differs."""
    files = sorted({path.name for path in (ROOT / "config").glob("*.yaml")} - {*BASES})
    with tempfile.TemporaryDirectory() as folder:
        tree = subprocess.run(
            ["git", "archive", sys.argv[1]], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=tree.stdout, check=True)
        before = resolved(Path(folder), files)
    after = resolved(ROOT, files)
    held = [name for name, document in before.items() if "error" not in document]
    # As text, which tells 2 from 2.0, as the design's hash does.
    unlike = [
        name
        for name in held
        if json.dumps(before[name], sort_keys=True) != json.dumps(after[name], sort_keys=True)
    ]
    for name in unlike:
        print(f"DIFFERS {name}", *differences(before[name], after[name]), sep="\n  ")
    print(f"{len(held)} studies resolved, {len(before) - len(held)} refused, {len(unlike)} differ")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
