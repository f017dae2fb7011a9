"""A server with vLLM's command line that fails in the way that the variable FAKE_VLLM names.

The gates' tests run it in place of an environment's Python, so it also answers for
step_probe/hook_points.py and runs companions.
"""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

FAULT = os.environ.get("FAKE_VLLM", "")


def hook_points() -> None:
    missing = ["Scheduler.schedule"] if Path(__file__).with_name("half_known").exists() else []
    package = Path(__file__).parent / "site" / "vllm"
    print(json.dumps({"vllm": "9.9.9", "package": str(package), "targets": [], "missing": missing}))


def companion() -> None:
    if FAULT == "companion dies":
        sys.exit("the companion broke")
    sys.exit(subprocess.call([os.environ["REAL_PYTHON"], *sys.argv[1:]]))


def connectors(transfer: dict[str, Any] | None) -> list[str]:
    if transfer is None:
        return []
    children = transfer.get("kv_connector_extra_config", {}).get("connectors", [])
    return [transfer["kv_connector"], *(child["kv_connector"] for child in children)]


def write_steps(names: list[str], number: int) -> None:
    prefix = os.environ.get("AGENTIC_STEP_LOG_PATH")
    if not prefix or FAULT == "no steps":
        return
    own = bool(names) and FAULT != "hooks not called"
    children = names[1:2] if FAULT == "idle child" else names[1:]
    for process, hooks in (
        ("scheduler", ["build_connector_meta"]),
        ("worker", ["get_finished", "start_load_kv"]),
    ):
        called: list[tuple[str | None, str]] = [(None, hook) for hook in hooks if own]
        called += [(name, "get_finished") for name in children]
        groups = [(c, [hook], 3 + place) for place, (c, hook) in enumerate(called)]
        now = time.monotonic()
        record = [n for _, _, place in groups for n in (now, now + 1e-6, -1 - place)]
        span = [now, now + 1e-6]
        if process == "scheduler":
            # schedule() with its counts, update_from_output(), step()
            record += [*span, number, 1, 0, 0, 1, -1, *span, number, -2, *span, -3]
        else:
            # execute_model(), after which the step is complete
            record += [*span, number, 1, -1]
        path = Path(f"{prefix}.{process}.steps")
        with path.open("ab") as log:
            if not log.tell():
                log.write(json.dumps({"process": process, "groups": groups}).encode() + b"\n")
            log.write(array("d", record).tobytes())


class Handler(http.server.BaseHTTPRequestHandler):
    names: list[str]
    model = ""
    served = 0

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            model = "another-model" if FAULT == "wrong model" else self.model
            self.answer(200, {"data": [{"id": model}]})
        elif self.path == "/health":
            self.answer(503 if FAULT == "unhealthy" else 200, {})
        elif FAULT == "no metrics page":
            self.text(200, "<html>not a metrics page</html>")
        else:
            value = 1 if FAULT == "failed counter" else 0
            self.text(200, f"vllm:engine_core_failed_total {value}.0\n")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).served += 1
        if FAULT == "dies" and self.served == 2:
            os._exit(7)
        if FAULT == "slow":
            time.sleep(30)
        if FAULT == "error status":
            self.answer(500, {"error": "the engine is broken"})
            return
        if FAULT == "dead engine":
            print("EngineDeadError: EngineCore encountered an issue", flush=True)
        write_steps(self.names, self.served)
        tokens = asked["max_tokens"] - (FAULT == "few tokens")
        self.answer(200, {} if FAULT == "no usage" else {"usage": {"completion_tokens": tokens}})

    def answer(self, status: int, body: Any) -> None:
        self.text(status, json.dumps(body))

    def text(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def serve() -> None:
    def flag(name: str) -> str:
        return sys.argv[sys.argv.index(name) + 1]

    if FAULT == "exits":
        sys.exit("no memory left")
    if FAULT == "companion dies":
        # Never ready, however long the companion takes to end.
        signal.pause()
    text = flag("--kv-transfer-config") if "--kv-transfer-config" in sys.argv else "null"
    names = connectors(json.loads(text))
    if FAULT == "connector beside plain":
        print("Creating v1 connector with name: Stray and engine_id: x")
    if names and FAULT != "not created":
        print(f"Creating v1 connector with name: {names[0]}Implementation and engine_id: x")
    watched = names[:1] if FAULT == "child not created" else names
    if watched and os.environ.get("AGENTIC_STEP_LOG_PATH"):
        print(f"connector_tax step probe watches {' > '.join(watched)} (WORKER)")
    if FAULT == "dead connector" and names:
        print("\x1b[31mLMCache ERROR:\x1b[0m Failed to initialize the manager: Traceback (most")
        print('  File "x.py", line 1\nRuntimeError: No supported cpu connector found.')
    if FAULT.startswith("says "):
        print(FAULT.removeprefix("says "))
    if FAULT == "rdma without a device":
        print("INFO [m.py:1] The Mooncake Transfer Engine is using rdma as its protocol.")
        print("I1121 21:21:41.651367 3839 t.cpp:274] Topology discovery complete. Found 0 HCAs.")
    if FAULT == "lmcache without kernels":
        print("WARNING lmcache.cuda_ops compiled extension not found; CudaDeviceOps stays on")
    if FAULT == "ucx":
        print("2026-11-21 21:22:04 NIXL INFO    _api.py:405 Backend UCX was instantiated")
        if os.environ.get("UCX_LOG_LEVEL") == "info":
            lanes = "rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
            begin = f"[1795374876.446269] [{socket.gethostname()}:9751 :0]      ucp_worker.c:1997"
            print(f"{begin} UCX  INFO    an agent self cfg#0 {lanes}")
    sys.stdout.flush()
    Handler.names, Handler.model = names, flag("--served-model-name")
    http.server.ThreadingHTTPServer(("127.0.0.1", int(flag("--port"))), Handler).serve_forever()


if __name__ == "__main__":
    if sys.argv[1].endswith("hook_points.py"):
        hook_points()
    elif sys.argv[2].startswith("connector_tax"):
        companion()
    else:
        serve()
