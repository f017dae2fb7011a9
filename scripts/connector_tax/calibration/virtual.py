"""One cell of a launch in virtual time (engine.virtual), as the load generator would record it."""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from connector_tax.engine.config import EngineConfig
from connector_tax.engine.virtual import VirtualEngine
from connector_tax.loadgen import RequestRecord

Stamps = NDArray[np.int64]


def serve(
    config: EngineConfig, launch_seed: int, offsets_ns: Seq[int], shape: tuple[int, int]
) -> tuple[Stamps, Stamps]:
    """When each request of one cell gets its first and its last token.

    Args:
        config: the launch's configuration.
        launch_seed: of the launch offset and the step jitter, as the engine takes it.
        offsets_ns: (n,) arrivals, ascending.
        shape: input and output tokens of every request.

    Returns:
        two arrays (n,) in ns on the arrivals' axis.
    """
    engine = VirtualEngine(config, launch_seed)
    first, last = np.zeros(len(offsets_ns), np.int64), np.zeros(len(offsets_ns), np.int64)
    incoming = deque((int(offset), number) for number, offset in enumerate(offsets_ns))
    while incoming or engine.scheduler.has_work:
        if not engine.scheduler.has_work:
            engine.now_ns = max(engine.now_ns, incoming[0][0])
        while incoming and incoming[0][0] <= engine.now_ns:
            engine.add(incoming.popleft()[1], *shape)
        for sequence in engine.step():
            if sequence.generated == 1:
                first[sequence.sink] = engine.now_ns
            last[sequence.sink] = engine.now_ns
    return first, last


def request_records(
    origin_ns: int,
    warmup_end_ns: int,
    offsets_ns: Seq[int],
    tokens: tuple[Stamps, Stamps],
    shape: tuple[int, int],
) -> list[RequestRecord]:
    """The records a load generator without any lag of its own would have written."""
    records = []
    for number, (offset, first, last) in enumerate(zip(offsets_ns, *tokens, strict=True)):
        intended = origin_ns + int(offset)
        t_first, t_last = origin_ns + int(first), origin_ns + int(last)
        records.append(
            RequestRecord(
                request_id=str(number),
                seq=number,
                warmup=intended < warmup_end_ns,
                t_intended_ns=intended,
                t_issue_ns=intended,
                t_worker_ns=intended,
                t_conn_ns=intended,
                t_send_ns=intended,
                t_headers_ns=t_first,
                t_first_token_ns=t_first,
                t_last_token_ns=t_last,
                t_done_ns=t_last,
                prompt_tokens=shape[0],
                completion_tokens=shape[1],
                worker=0,
            )
        )
    return records
