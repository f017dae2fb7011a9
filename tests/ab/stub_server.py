"""Serve a minimal chat endpoint unlike vLLM's: words as tokens, no usage, no metrics.

python stub_server.py PORT [401] [garbage] [nested] [same [short]] [redirect] [absent] [healthy]
    [page] [odd] [key=KEY [header=NAME]] [base=PATH] [tls=CERTIFICATE,KEY] [health=STATUS]
    [loads=SECONDS] [named=PROCESS] [core=PROGRAM] [silent=NUMBER] [host=ADDRESS]

page: a page answers every unknown path. odd: values of wrong types, and an error of null. The
engine core, PROGRAM, dies on the first request, which is never answered. After NUMBER answers,
every second request gets none.
"""

import itertools
import json
import socket
import ssl
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

NAME = "embedded-model" if "same" in sys.argv else "stub"
CARD: dict[str, object] = {"id": NAME, "object": "model"}
for word, longest in {"short": 40, "odd": "4096"}.items():
    if word in sys.argv:
        CARD["max_model_len"] = longest
MODELS = {"object": "list", "data": [CARD]}
ODD = {"error": None, "usage": "none"} if "odd" in sys.argv else {}
KNOWN = {"model", "messages", "max_tokens", "temperature", "stream"}
REFUSES = "401" in sys.argv
OPTIONS = dict(word.split("=", 1) for word in sys.argv if "=" in word)
BASE = OPTIONS.get("base", "")
READY = time.monotonic() + float(OPTIONS.get("loads", 0))
SILENT_AFTER = int(OPTIONS.get("silent", 2**31))
ANSWERS = itertools.count()
CORE = subprocess.Popen([OPTIONS["core"], "1000"]) if "core" in OPTIONS else None


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def _refused(self) -> bool:
        key, header = OPTIONS.get("key"), OPTIONS.get("header")
        sent = self.headers[header or "Authorization"]
        return REFUSES or (key is not None and sent != (key if header else f"Bearer {key}"))

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
        elif "nested" in sys.argv:
            self._send_text(200, "[" * 100_000)
        elif self.path == f"{BASE}/v1/models":
            self._send(200, MODELS)
        elif "page" in sys.argv:
            self._send(200, "<html>")
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
        number = next(ANSWERS)
        if number >= SILENT_AFTER and number % 2:
            time.sleep(1000)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number in range(asked["max_tokens"]):
            time.sleep(0.002)
            last = number == asked["max_tokens"] - 1
            choice = {"index": 0, "delta": {"content": " word"},
                      "finish_reason": "length" if last else None}  # fmt: skip
            chunk = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
            self._chunk(chunk | ODD)
        self._write(b"data: [DONE]\n\n")
        self._write(b"")

    def _chunk(self, event: object) -> None:
        self._write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, content: object) -> None:
        self._send_text(status, json.dumps(content))

    def _send_text(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    if "named" in OPTIONS:
        Path("/proc/self/comm").write_text(OPTIONS["named"])
    host = OPTIONS.get("host", "127.0.0.1")
    ThreadingHTTPServer.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = ThreadingHTTPServer((host, int(sys.argv[1])), Handler)
    if "tls" in OPTIONS:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*OPTIONS["tls"].split(","))
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
