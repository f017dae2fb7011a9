"""Prompt files: real text, one JSON object per line with `prompt` or `messages`.

    {"prompt": "Write a haiku about TCP.", "max_tokens": 40}
    {"messages": [{"role": "user", "content": "And one about UDP."}]}

`prompt` is text or a list of token ids; `messages` go to a chat endpoint unchanged. A line may
leave `max_tokens` out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from connector_tax.loadgen.sessions import Messages, Node, Prompt, Singles, TokenIds


class PromptLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a prompt file."""

    prompt: str | TokenIds | None = None
    messages: Annotated[Messages, Meta(min_length=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts in the order of their file, each with the largest length of its answer in tokens."""

    prompts: list[Prompt]
    lengths: list[int]

    def __len__(self) -> int:
        return len(self.prompts)

    def __call__(self, index: int) -> Prompt:
        """Return the prompt of request `index`; after the last prompt the first follows again."""
        return self.prompts[index % len(self.prompts)]

    def singles(self, count: int) -> Singles:
        """Return `count` sessions of one request each."""
        return Singles(count, Node("0", "", 1), self.lengths)


def read_prompts(path: Path, chat: bool, max_tokens: int) -> Prompts:
    """Read a prompt file.

    Args:
        chat: the endpoint takes messages; a text becomes a user's message.
        max_tokens: for lines that give none.

    Raises:
        ValueError: a line is not a prompt, or not one that this endpoint takes; names file, line
            and key.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(PromptLine)
    read = Prompts([], [])
    with path.open("rb") as stream:
        for number, text in enumerate(stream, 1):
            try:
                line = decoder.decode(text)
                read.prompts.append(_prompt(line, chat))
            # DecodeError is a ValueError.
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}:{number}: {error}; allowed: an object with prompt or messages, and "
                    "max_tokens"
                ) from None
            read.lengths.append(line.max_tokens or max_tokens)
    if not read.prompts:
        raise ValueError(f"{path}: holds no prompt")
    return read


def _prompt(line: PromptLine, chat: bool) -> Prompt:
    if line.messages is not None:
        if line.prompt is not None:
            raise ValueError("both prompt and messages given")
        if not chat:
            raise ValueError("messages given for a completions endpoint; add --chat")
        if any("role" not in message for message in line.messages):
            raise ValueError("message without a role")
        return line.messages
    if line.prompt is None:
        raise ValueError("neither prompt nor messages given")
    if chat and not isinstance(line.prompt, str):
        raise ValueError("token ids given, but a chat endpoint takes text")
    return line.prompt
