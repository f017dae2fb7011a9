"""One cell of one launch in virtual time: the engine's scheduler and step cost, no clock, no HTTP.

The loop below is `engine.loop.Engine._run` without what waits: a step starts at the last one's
deadline, or when work arrives; everything that decides a time (plan, cost draw, launch offset,
taxes, commit) is the engine's own code.
"""

from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from connector_tax.engine.config import EngineConfig
from connector_tax.engine.model import StepClock
from connector_tax.engine.scheduler import Scheduler, Sequence
from connector_tax.loadgen import RequestRecord

Stamps = NDArray[np.int64]


def serve(
    engine: EngineConfig, launch_seed: int, offsets_ns: Seq[int], shape: tuple[int, int]
) -> tuple[Stamps, Stamps]:
    """When each request gets its first and its last token.

    Args:
        engine: the launch's configuration.
        launch_seed: of the launch offset and the step jitter, as the engine takes it.
        offsets_ns: (n,) arrivals, ascending.
        shape: input and output tokens of every request.

    Returns:
        two arrays (n,) in ns on the arrivals' axis.
    """
    clock, scheduler = (
        StepClock(engine.step_cost, launch_seed),
        Scheduler(engine.scheduler, engine.model.max_model_len),
    )
    first, last = np.zeros(len(offsets_ns), np.int64), np.zeros(len(offsets_ns), np.int64)
    incoming = deque((int(offset), number) for number, offset in enumerate(offsets_ns))
    deadline = 0
    while incoming or scheduler.has_work:
        start = deadline if scheduler.has_work else max(deadline, incoming[0][0])
        while incoming and incoming[0][0] <= start:
            # Fresh random prompts never hit the prefix cache, so no digests are needed.
            scheduler.add(Sequence(incoming.popleft()[1], *shape, []))
        plan = scheduler.plan()
        host_tax = load_tax = 0.0
        if engine.tax is not None:
            meta = engine.tax.build_meta(scheduler.pool.cached, len(plan.admitted))
            host_tax, load_tax = meta + engine.tax.get_finished_us, engine.tax.start_load_kv_us
        host, device = clock.draw_us(plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens)
        deadline = start + round((host + host_tax) * 1000) + round((load_tax + device) * 1000)
        for sequence in scheduler.commit(plan):
            if sequence.generated == 1:
                first[sequence.arrival] = deadline
            last[sequence.arrival] = deadline
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
                status="ok",
                error_kind=None,
                error_detail=None,
                warmup=intended < warmup_end_ns,
                cooldown=False,
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
                inflight_at_send=None,
                worker=0,
                reads=None,
            )
        )
    return records
