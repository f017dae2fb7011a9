"""Write models without weights: a config.json and a word-level tokenizer, without hub or network.

The tiny model of the CPU study is a Qwen3 of 2 layers, whose weights vLLM fills with random numbers
(`--load-format dummy`). An emulated device's model has the config.json of a full-size model, and
no weights at all. Prompts are token ids, so the tokenizer only has to turn ids into text.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from connector_tax.config import DEFAULTS
from connector_tax.files import read_json, write_json

KNOWN = DEFAULTS / "models"
TINY = KNOWN / "tiny-qwen3.json"
UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """Return tokenizer.json: one word for each token id, split at spaces."""
    words = [UNKNOWN, BEGIN, END, *(f"w{i}" for i in range(3, vocab_size))]
    kept = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": i, "content": words[i], **kept, "special": True} for i in range(3)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": UNKNOWN,
        },
    }


def write_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the four files of a model with this config.json; their bytes are the same each time."""
    write_json(folder / "tokenizer.json", tokenizer(config["vocab_size"]))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "unk_token": UNKNOWN,
            "bos_token": BEGIN,
            "eos_token": END,
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    # Written last: its presence marks a complete model.
    write_json(folder / "config.json", config)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a model without weights."""
    parser = argparse.ArgumentParser(prog="connector-tax tiny-model", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    parser.add_argument(
        "--config",
        type=Path,
        help="its config.json (default: config/models/<its name>.json, else the tiny model's)",
    )
    arguments = parser.parse_args(argv)
    known = KNOWN / f"{arguments.out.name}.json"
    config = read_json(arguments.config or (known if known.exists() else TINY))
    write_model(arguments.out, config)
    print(json.dumps({"model": str(arguments.out), "vocab_size": config["vocab_size"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
