"""The truth log: what the server itself knows about each request, in CLOCK_MONOTONIC ns.

One JSON object for each line: first the launch, then each request when its response has ended.
"""

import msgspec


class LaunchTruth(msgspec.Struct, tag="launch", tag_field="record"):
    """The launch: its seeded offset and the taxes it was given (None without a connector)."""

    configuration: str
    launch_seed: int
    launch_factor: float
    step_cost: dict[str, float]
    tax: dict[str, float] | None


class RequestTruth(msgspec.Struct, tag="request", tag_field="record"):
    """One request.

    Attributes:
        request_id: the client's X-Request-Id, else the engine's own id.
        t_arrival_ns: the read that brought the request's last byte.
        t_headers_ns: the write of the response's head.
        writes: [t_ns, tokens, deadline_ns] for each write of the body; t_ns stands right before the
            system call, deadline_ns is the end of the step that made the tokens (0 if none did).
        outcome: ok, disconnected, stopped, or the fault's or the error's name.
    """

    request_id: str
    t_arrival_ns: int
    t_headers_ns: int
    writes: list[tuple[int, int, int]]
    prompt_tokens: int
    completion_tokens: int
    preemptions: int
    fault: str | None
    outcome: str
