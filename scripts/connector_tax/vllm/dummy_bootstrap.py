"""Serve as a bootstrap server without peers, so that a Mooncake consumer can start alone.

Answers the two calls of vLLM's Mooncake bootstrap protocol: POST /register stores a worker's entry,
GET /query lists the entries (none for a lone consumer). Used by the gate `verify_kv_consumer`
(docs/study.md). Source: vLLM 0.32, mooncake_utils.MooncakeBootstrapServer. Standard library only,
since it runs in vLLM's environment.
"""

import argparse
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_BODY = 1 << 20


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    workers: dict[int, dict[str, Any]]
    lock: threading.Lock

    def do_GET(self) -> None:
        if self.path == "/query":
            with self.lock:
                self._answer(200, self.workers)
        else:
            self._refuse_path()

    def do_POST(self) -> None:
        if self.path != "/register":
            self._refuse_path()
            return
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 < length <= MAX_BODY:
                raise ValueError(f"Content-Length {length}; allowed: 1 to {MAX_BODY}")
            payload = json.loads(self.rfile.read(length))
            rank, engine = int(payload["dp_rank"]), str(payload["engine_id"])
            tp_rank, pp_rank = int(payload["tp_rank"]), int(payload["pp_rank"])
            address = str(payload["addr"])
        except (ValueError, KeyError, TypeError) as error:
            self._answer(400, {"detail": f"{type(error).__name__}: {error}"}, close=True)
            return
        with self.lock:
            entry = self.workers.setdefault(rank, {"engine_id": engine, "worker_addr": {}})
            if entry["engine_id"] != engine:
                detail = f"dp_rank {rank} belongs to engine {entry['engine_id']}, not {engine}"
                self._answer(400, {"detail": detail})
                return
            entry["worker_addr"].setdefault(tp_rank, {})[pp_rank] = address
        self._answer(200, {"status": "ok"})

    def _refuse_path(self) -> None:
        detail = f"{self.path}: not served; allowed: GET /query and POST /register"
        self._answer(404, {"detail": detail}, close=True)

    def _answer(self, status: int, body: Any, *, close: bool = False) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        if close:
            # An unread body would be parsed as the next request.
            self.send_header("Connection", "close")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def make_server(port: int) -> ThreadingHTTPServer:
    """Return the server on 127.0.0.1:`port` (0: any free port), before it serves requests."""
    handler = type("Handler", (_Handler,), {"workers": {}, "lock": threading.Lock()})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    """Run the bootstrap server until this process is killed."""
    parser = argparse.ArgumentParser(
        prog="python -m connector_tax.vllm.dummy_bootstrap", description=main.__doc__
    )
    parser.add_argument("--port", type=int, required=True)
    make_server(parser.parse_args().port).serve_forever()


if __name__ == "__main__":
    main()
