"""The baseline server: each request sleeps for each of its tokens, on its own.

The manner of llm-d-inference-sim: no batch, no step, one task for each request. The same event
sizes and the same kind of truth (how late each token was against the request's own schedule) as
the engine's. Run as `python -m benchmarks.sleepers PORT STEP_S LOG`.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import uvloop

_EVENT = (
    b'data: {"id":"cmpl-0000000000000000","object":"text_completion","created":1700000000,'
    b'"model":"embedded-model","choices":[{"index":0,"text":" w%d","logprobs":null,'
    b'"finish_reason":null,"stop_reason":null}]}\n\n'
)


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, step_s: float, late_ns: list[int]
) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            tokens = json.loads(await reader.readexactly(size))["max_tokens"]
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            loop = asyncio.get_running_loop()
            begin, begin_ns = loop.time(), time.monotonic_ns()
            for i in range(1, tokens + 1):
                await asyncio.sleep(begin + i * step_s - loop.time())
                event = _EVENT % (i % 32000)
                late_ns.append(time.monotonic_ns() - begin_ns - round(i * step_s * 1e9))
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve(port: int, step_s: float, log: Path) -> None:
    late_ns: list[int] = []
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await asyncio.start_server(lambda r, w: _answer(r, w, step_s, late_ns), "127.0.0.1", port)
    print("ready on port", port, file=sys.stderr, flush=True)
    await ended.wait()
    log.write_text(json.dumps(late_ns))


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])))
