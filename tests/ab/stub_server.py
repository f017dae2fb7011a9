"""Serve a minimal chat endpoint unlike vLLM's: words as tokens, no usage, no metrics.

python stub_server.py PORT [401] [garbage] [same [short]] [redirect] [absent] [healthy] [key=KEY]
    [base=PATH] [tls=CERTIFICATE,KEY] [health=STATUS] [loads=SECONDS] [named=PROCESS] [core=PROGRAM]

The engine core, PROGRAM, dies on the first request, which is never answered.
"""

import json
import ssl
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CARD = {"id": "embedded-model" if "same" in sys.argv else "stub", "object": "model"}
MODELS = {"object": "list", "data": [CARD | ({"max_model_len": 40} if "short" in sys.argv else {})]}
KNOWN = {"model", "messages", "max_tokens", "temperature", "stream"}
REFUSES = "401" in sys.argv
OPTIONS = dict(word.split("=", 1) for word in sys.argv if "=" in word)
BASE = OPTIONS.get("base", "")
READY = time.monotonic() + float(OPTIONS.get("loads", 0))
CORE = subprocess.Popen([OPTIONS["core"], "1000"]) if "core" in OPTIONS else None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def _refused(self) -> bool:
        key = OPTIONS.get("key")
        return REFUSES or (key is not None and self.headers["Authorization"] != f"Bearer {key}")

    def do_GET(self) -> None:
        if "redirect" in sys.argv:
            self.send_response(301)
            self.send_header("Location", f"https://elsewhere{self.path}?at={time.time()}")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif "absent" in sys.argv:
            self._send(404, {"error": "no such path"})
        elif "health" in OPTIONS and self.path == f"{BASE}/health":
            self._send(int(OPTIONS["health"]), {"error": "unwell"})
        elif self._refused():
            self._send(401, {"error": "no key"})
        elif time.monotonic() < READY and self.path == f"{BASE}/v1/models":
            self._send(503, {"error": "loading"})
        elif "healthy" in sys.argv and self.path == f"{BASE}/health":
            self._send(200, {})
        elif "garbage" in sys.argv:
            self._send(200, "Hello")
        elif self.path == f"{BASE}/v1/models":
            self._send(200, MODELS)
        else:
            self._send(404, {"error": "no such path"})

    def do_POST(self) -> None:
        if CORE is not None:
            CORE.kill()
            time.sleep(1000)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._refused():
            self._send(401, {"error": "no key"})
            return
        if self.path != f"{BASE}/v1/chat/completions":
            self._send(404, {"error": "chat only"})
            return
        if unknown := asked.keys() - KNOWN:
            self._send(422, {"error": f"unexpected keys: {sorted(unknown)}"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            time.sleep(0.002)
            last = number == asked["max_tokens"] - 1
            choice = {"index": 0, "delta": {"content": " word"},
                      "finish_reason": "length" if last else None}  # fmt: skip
            self._chunk({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _chunk(self, event: object) -> None:
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    if "named" in OPTIONS:
        Path("/proc/self/comm").write_text(OPTIONS["named"])
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    if "tls" in OPTIONS:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*OPTIONS["tls"].split(","))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
