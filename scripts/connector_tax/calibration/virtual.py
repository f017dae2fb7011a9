"""One launch in virtual time: the engine's scheduler and step cost, no clock, no HTTP.

A step is that of `engine.loop.Engine._run` without what waits; everything that decides a time
(plan, cost draw, launch offset, taxes, commit) is the engine's own code.
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


class VirtualEngine:
    """One launch of the embedded engine on a clock of its own; `now_ns` is where it stands.

    Args:
        config: the launch's configuration.
        seed: of the launch offset and the step jitter, as the engine takes it.
    """

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self._tax = config.tax
        self.scheduler = Scheduler(config.scheduler, config.model.max_model_len)
        self._clock = StepClock(config.step_cost, seed)
        self._block_size = config.scheduler.kv_block_size
        self._arrivals = 0
        self.now_ns = 0

    def add(self, seq: int, prompt: int, output: int) -> None:
        """A request arrives; no other shares a block of its prompt."""
        self._arrivals += 1
        blocks = range(prompt // self._block_size)
        digests = [b"%d/%d" % (self._arrivals, block) for block in blocks]
        self.scheduler.add(Sequence(self._arrivals, prompt, output, digests, seq))

    def step(self) -> list[Sequence]:
        """Run a step to its end; the requests that got a token, the number of each in `sink`."""
        plan = self.scheduler.plan()
        host_tax = load_tax = 0.0
        if self._tax is not None:
            meta = self._tax.build_meta(self.scheduler.pool.cached, len(plan.admitted))
            host_tax, load_tax = meta + self._tax.get_finished_us, self._tax.start_load_kv_us
        host, device = self._clock.draw_us(plan.prefill_tokens, plan.decode_seqs, plan.kv_tokens)
        self.now_ns += round((host + host_tax) * 1000) + round((load_tax + device) * 1000)
        return self.scheduler.commit(plan)


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
