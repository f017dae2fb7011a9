"""Return the part of an answer that descendants inherit."""

from collections.abc import Sequence
from typing import Any

from connector_tax.loadgen.messages import Output
from connector_tax.loadgen.sse import Choice, Message, text_of


def output_of(choices: Sequence[Choice]) -> Output:
    """Return the text of an answer, or its message where text is not all that it says.

    Args:
        choices: the chunks of a stream that brought something, or the one of a whole response.

    A message with tool calls keeps these; one without text keeps its reasoning, under the name that
    the server gave it. Reasoning before a text is not inherited.
    """
    text = "".join(map(text_of, choices))
    messages = [message for c in choices if (message := c.delta or c.message) is not None]
    content = text or None
    if calls := _calls(messages):
        return {"role": "assistant", "content": content, "tool_calls": calls}
    for name in ("reasoning", "reasoning_content"):
        thought = "".join(getattr(message, name) or "" for message in messages)
        if thought and not text:
            return {"role": "assistant", "content": None, name: thought}
    return text


def _calls(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the tool calls, whose names and arguments may have come in parts."""
    calls: dict[int, dict[str, Any]] = {}
    for message in messages:
        for place, part in enumerate(message.tool_calls or ()):
            call = calls.setdefault(part.get("index", place), {})
            for key, value in part.items():
                if key == "function":
                    function = call.setdefault("function", {})
                    for name, piece in value.items():
                        function[name] = function.get(name, "") + (piece or "")
                elif key != "index" and value is not None:
                    call[key] = value
    return [calls[index] for index in sorted(calls)]
