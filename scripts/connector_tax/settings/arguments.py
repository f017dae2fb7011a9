"""The command line of `connector-tax settings`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from connector_tax.commands import AnsweringParser
from connector_tax.settings.request import MODELS, given

EPILOG = """exit status:
  0   no connector changes anything
  1   a connector changes something, or vLLM rejects it
  3   a row could not be resolved
  64  the command line is wrong"""
GPUS = ("h200", "h100", "a100")
# Argument of vLLM that this command sets -> the option that sets it.
_OURS = {
    "--model": "--model",
    "--kv-transfer-config": "--connector or --kv-transfer-config",
    "--max-model-len": "--max-model-len",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--kv-cache-memory-bytes": "--kv-gib",
    "--load-format": "nothing: no weights are read",
    "--trust-remote-code": "nothing: no code of a model is run",
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the checked options; on an error print a line and exit with status 64."""
    parser = AnsweringParser(
        prog="connector-tax settings",
        description="Show how a KV connector changes vLLM's settings and KV cache capacity."
        " Nothing is started or measured.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-- ARGUMENTS OF vLLM]",
    )
    add = parser.add_argument
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--python", metavar="PATH", help="Python with another vLLM, resolved on its"
                       " own platform [built by `make vllm-settings`]")  # fmt: skip
    whose.add_argument("--gpu", choices=GPUS, default=None,
                       help="GPU that vLLM sees [h200]")  # fmt: skip
    add("--model", action="append", metavar="FOLDER", help="a folder with a config.json, a hub name"
        f" OWNER/NAME, or a shipped shape; may be repeated [{', '.join(MODELS)}]")  # fmt: skip
    add("--connector", action="append", default=[], metavar="NAME",
        help="a connector that vLLM registers; may be repeated [all]")  # fmt: skip
    add("--kv-transfer-config", action="append", default=[], type=_case, metavar="JSON",
        help="a connector's configuration in vLLM's form; may be repeated")  # fmt: skip
    add("--kv-gib", type=_positive, default=20.0, metavar="GIB",
        help="memory for the KV cache of one GPU [20]")  # fmt: skip
    add("--max-model-len", type=_count, metavar="N",
        help="longest context in tokens [each model's own]")  # fmt: skip
    add("--tp", type=_count, default=1, metavar="N", help="tensor parallel size [1]")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print the answer as JSON")
    output.add_argument("--csv", action="store_true", help="print the answer as CSV")
    add("--export-markdown", type=Path, metavar="FILE", help="also write the tables as Markdown")
    words = [*(sys.argv[1:] if argv is None else argv)]
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end])
    options.arguments = words[end + 1 :]
    for word in options.arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in _OURS:
            parser.error(f"found {word!r} after --; allowed: other arguments of vLLM, as"
                         f" this is set by {_OURS[name]}")  # fmt: skip
    if options.python == "":
        parser.error("--python: found ''; allowed: a Python that has vLLM")
    given_names = [case["name"] for case in options.kv_transfer_config]
    for option, names in (("connector", options.connector), ("kv-transfer-config", given_names)):
        if twice := [name for name in names if names.count(name) > 1]:
            parser.error(f"--{option}: found {twice[0]!r} twice; allowed: each name once")
    parser.check_page(options.export_markdown)
    if "MultiConnector" in options.connector:
        parser.error("--connector: MultiConnector has children; name them in --kv-transfer-config")
    return options


def _case(text: str) -> object:
    try:
        return given(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a number above 0, below 1e6")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number of at least 1")
    return int(text)
