"""Serve scripted answers byte for byte, in a thread, on a loopback port.

An answer's script is a list of steps. The client names the script in its request body, as
`{"script": "name"}`, so that one run of the load generator can contain every fault.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pause:
    """A step that waits before the next one."""

    seconds: float


class Fin:
    """A step that closes the connection in order."""


class Reset:
    """A step that closes the connection with RST."""


class Hang:
    """A step that sends nothing more until the client disconnects."""


Step = bytes | Pause | type[Fin] | type[Reset] | type[Hang]


def event(data: str, ending: str = "\n") -> bytes:
    """Return one server-sent event."""
    return f"data: {data}{ending}{ending}".encode()


def token(text: str = " tok", finish: str | None = None) -> str:
    """Return a completion chunk in vLLM's compact form."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    chunk = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "usage": None}
    return json.dumps(chunk, separators=(",", ":"))


def usage(prompt: int = 4, completion: int = 3) -> str:
    """Return the chunk with the token counts, `usage`."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": 7}
    return json.dumps({"id": "cmpl-1", "choices": [], "usage": counts}, separators=(",", ":"))


def chunked(*parts: bytes, last: bool = True) -> bytes:
    """Return `parts` in chunked transfer coding, one chunk each."""
    return b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + (b"0\r\n\r\n" if last else b"")


HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def good_events(ending: str = "\n") -> list[bytes]:
    """Return the events of a good answer: three tokens, usage, [DONE]."""
    datas = [token(), token(), token(finish="length"), usage(), "[DONE]"]
    return [event(data, ending) for data in datas]


def good_answer(ending: str = "\n") -> bytes:
    """Return a complete good answer."""
    return HEAD + chunked(*good_events(ending))


class FaultServer:
    """A server of scripts; `requests` and `bodies` list the names and the JSON as they arrived."""

    def __init__(
        self,
        scripts: Mapping[str, Sequence[Step]],
        choose: Callable[[dict[str, Any]], str] = lambda body: str(body["script"]),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._scripts = scripts
        self._choose = choose
        self._tls = tls
        self.models = ["m"]
        self.starting = 0  # GETs that are answered 503 before the models are listed
        self.asked: list[bytes] = []
        self.connections = 0
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self.port = 0
        self.requests: list[str] = []

    def __enter__(self) -> "FaultServer":
        """Listen on a free port."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, backlog=1024, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(
            asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError
        ):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    await self._list_models(head, writer)
                    continue
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                name = self._choose(body)
                self.heads.append(head)
                self.bodies.append(body)
                self.requests.append(name)
                if not await self._play(self._scripts[name], reader, writer):
                    break
        writer.close()

    async def _list_models(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        self.asked.append(head)
        if self.starting:
            self.starting -= 1
            writer.write(b"HTTP/1.1 503 Starting\r\ncontent-length: 0\r\n\r\n")
            return
        body = json.dumps({"data": [{"id": name} for name in self.models]}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()

    async def _play(
        self, script: Sequence[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Play a script; return True if the connection stays open for another request."""
        for step in script:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
            elif step is Hang:
                await reader.read(1)
                return False
            elif step is Fin:
                return False
            else:
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                return False
        return True


def serve(*script: Step) -> FaultServer:
    """Return a server that answers every request with `script`."""
    return FaultServer({"x": script}, lambda _body: "x")


@contextlib.contextmanager
def refused_port() -> Iterator[int]:
    """Yield a port that refuses connections: bound, but not listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
