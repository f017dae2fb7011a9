"""Request bodies: prompts of one length, fresh for every cell, block and configuration.

The same work for all, and no reuse: same lengths for every configuration, fresh random ids so that
no cache can hit, `ignore_eos` with `max_tokens` = `min_tokens`, usage asked for. A server that
takes no token ids is sent random words, as many as come to the wanted length by its own count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from connector_tax.artifacts.study_records import ServedSection
from connector_tax.loadgen import PlannedRequest, RandomPrompts, RandomWords, RequestSource

# Ids below this are special tokens in common tokenizers; a random prompt stays above them.
FIRST_PLAIN_TOKEN = 10
# By what a server takes.
_LEFT_OUT = {
    "vllm": (),
    "openai": ("min_tokens", "ignore_eos"),
    "bare": ("min_tokens", "ignore_eos", "stream_options"),
}


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """`count` requests whose prompts are `words` random words; every iteration makes the same."""

    name: str
    seed: str
    count: int
    words: int
    chat: bool
    before: dict[str, Any]
    after: dict[str, Any]
    completion_tokens: int | None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[PlannedRequest]:
        prompt = RandomWords(self.seed, self.words)
        encode = msgspec.json.Encoder().encode
        for k in range(self.count):
            text = prompt()
            asked = (
                {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}
            )
            body = encode({**self.before, **asked, **self.after})
            yield PlannedRequest(f"{self.name}/{k}", body, None, self.completion_tokens)


def planned_requests(
    served: ServedSection,
    *,
    input_tokens: int,
    output_tokens: int,
    count: int,
    seed: int,
    name: str,
) -> RequestSource:
    """`count` streaming completion requests of one shape, made as they are asked for.

    Args:
        served: what the server serves; ids are drawn uniformly from [10, vocab_size).
        seed, name: the study's seed and the path-like name of this cell's content.
    """
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
    stream = f"{seed}/content/{name}"
    wanted = output_tokens if served.get("exact_output", True) else None
    vocab_size = served["vocab_size"]
    if vocab_size is None:
        words = (input_tokens - served["fixed_tokens"]) / served["tokens_per_word"]
        return TextPrompts(
            name, stream, count, max(1, round(words)), served["chat"], before, after, wanted
        )
    return RandomPrompts(
        name=name,
        seed=stream,
        count=count,
        tokens=input_tokens,
        first_id=FIRST_PLAIN_TOKEN,
        end_id=vocab_size,
        before=before,
        after=after,
        completion_tokens=wanted,
    )
