"""Request bodies: prompts of one length, fresh for every cell, block and configuration.

The same work for all, and no reuse: same lengths for every configuration, fresh random ids so that
no cache can hit, `ignore_eos` with `max_tokens` = `min_tokens`, usage asked for. A server that
takes no token ids is sent random words, as many as come to the wanted length by its own count.
"""

from collections.abc import Callable
from typing import Any

from connector_tax.artifacts.study_records import StudyDocument
from connector_tax.loadgen import RequestSource, random_requests, random_tokens, random_words
from connector_tax.servers.kinds import engine_of

# Ids below this are special tokens in common tokenizers; a random prompt stays above them.
FIRST_PLAIN_TOKEN = 10
# By what a server takes.
_LEFT_OUT = {
    "vllm": (),
    "openai": ("min_tokens", "ignore_eos"),
    "bare": ("min_tokens", "ignore_eos", "stream_options"),
}


def planned_requests(
    study: StudyDocument, name: str, shape: tuple[int, int], count: int
) -> RequestSource:
    """`count` streaming completion requests of one shape, made as they are asked for.

    Token ids are drawn uniformly from [10, vocab_size).

    Args:
        name: the path-like name of this cell's content.
        shape: input and output tokens.
    """
    input_tokens, output_tokens = shape
    served = engine_of(study["config"]["engine"]).served
    before = {"model": served["model"]}
    after: dict[str, Any] = {
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for key in _LEFT_OUT[served.get("body", "vllm")]:
        del after[key]
    stream = f"{study['seed']}/content/{name}"
    wanted = output_tokens if served.get("exact_output", True) else None
    prompt: Callable[[], str | list[int]]
    vocab_size, prompt_tokens = served["vocab_size"], None
    if vocab_size is None:
        words = (input_tokens - served["fixed_tokens"]) / served["tokens_per_word"]
        prompt = random_words(stream, max(1, round(words)))
    else:
        prompt = random_tokens(stream, input_tokens, FIRST_PLAIN_TOKEN, vocab_size)
        prompt_tokens = input_tokens
    chat = vocab_size is None and served["chat"]
    return random_requests(name, count, prompt, chat, before, after, prompt_tokens, wanted)
