"""Return the part of an answer that later requests of its session contain."""

from collections.abc import Mapping, Sequence
from typing import Any

from connector_tax.loadgen.messages import Output
from connector_tax.loadgen.sse import Choice, Message, text_of


def output_of(choices: Sequence[Choice]) -> Output:
    """Return the text of an answer, or its message if it contains more than text.

    A message with calls keeps them; a message without text keeps its reasoning, under the server's
    name for it, or its refusal. Reasoning before a text is not inherited.

    Args:
        choices: the chunks of a stream that brought something, or the single choice of a whole
            response.
    """
    text = "".join(map(text_of, choices))
    messages = [message for c in choices if (message := c.delta or c.message) is not None]
    content = text or None
    if calls := _calls(messages):
        return {"role": "assistant", "content": content, "tool_calls": calls}
    if parts := [message.function_call for message in messages if message.function_call]:
        call: dict[str, str] = {}
        for part in parts:
            _extend(call, part)
        return {"role": "assistant", "content": content, "function_call": call}
    for name in ("reasoning", "reasoning_content", "refusal"):
        thought = "".join(getattr(message, name) or "" for message in messages)
        if thought and not text:
            return {"role": "assistant", "content": None, name: thought}
    return text


def _calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the tool calls, joined from the parts of their names and arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for message in messages:
        for place, part in enumerate(message.tool_calls or ()):
            call = calls.setdefault(part.get("index", place), {})
            for key, value in part.items():
                if key == "function":
                    _extend(call.setdefault("function", {}), value)
                elif key != "index" and value is not None:
                    call[key] = value
    return [calls[index] for index in sorted(calls)]


def _extend(function: dict[str, str], part: Mapping[str, str | None]) -> None:
    """Append the parts of a call's name and arguments that a chunk contains."""
    for name, piece in part.items():
        function[name] = function.get(name, "") + (piece or "")
