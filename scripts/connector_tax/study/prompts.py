"""Request bodies: token-id prompts of exact length, fresh for every cell, block and configuration.

The same work for all, and no reuse: same lengths for every configuration, fresh random ids so that
no cache can hit, `ignore_eos` with `max_tokens` = `min_tokens`, usage asked for.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from connector_tax.loadgen import PlannedRequest
from connector_tax.seeds import named_generator

# Ids below this are special tokens in common tokenizers; a random prompt stays above them.
FIRST_PLAIN_TOKEN = 10


def planned_requests(
    *,
    model: str,
    vocab_size: int,
    input_tokens: int,
    output_tokens: int,
    count: int,
    seed: int,
    name: str,
) -> list[PlannedRequest]:
    """`count` streaming completion requests of one shape.

    Args:
        model: served model name.
        vocab_size: ids are drawn uniformly from [10, vocab_size).
        seed, name: the study's seed and the path-like name of this cell's content.
    """
    rng = named_generator(f"{seed}/content/{name}")
    texts = np.array([str(token) for token in range(vocab_size)], dtype=object)
    head = f'{{"model":{json.dumps(model)},"prompt":['.encode()
    tail = b"]," + _sampling(output_tokens)[1:]
    requests = []
    for index in range(count):
        tokens = rng.integers(FIRST_PLAIN_TOKEN, vocab_size, size=input_tokens)
        body = head + ",".join(texts[tokens]).encode() + tail
        requests.append(
            PlannedRequest(
                request_id=f"{name}/{index}",
                body=body,
                prompt_tokens=input_tokens,
                completion_tokens=output_tokens,
            )
        )
    return requests


def bodies_sha256(requests: Iterable[PlannedRequest]) -> str:
    """SHA-256 over the bodies in order, a newline after each."""
    digest = hashlib.sha256()
    for request in requests:
        digest.update(request.body + b"\n")
    return digest.hexdigest()


def _sampling(output_tokens: int) -> bytes:
    options: Mapping[str, Any] = {
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(options, separators=(",", ":")).encode()
