"""Request bodies: token-id prompts of exact length, fresh for every cell, block and configuration.

The same work for all, and no reuse: same lengths for every configuration, fresh random ids so that
no cache can hit, `ignore_eos` with `max_tokens` = `min_tokens`, usage asked for.
"""

from connector_tax.loadgen import RandomPrompts

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
) -> RandomPrompts:
    """`count` streaming completion requests of one shape, made as they are asked for.

    Args:
        model: served model name.
        vocab_size: ids are drawn uniformly from [10, vocab_size).
        seed, name: the study's seed and the path-like name of this cell's content.
    """
    return RandomPrompts(
        name=name,
        seed=f"{seed}/content/{name}",
        count=count,
        tokens=input_tokens,
        first_id=FIRST_PLAIN_TOKEN,
        end_id=vocab_size,
        before={"model": model},
        after={
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        completion_tokens=output_tokens,
    )
