"""A stub of a cluster for Indexed Jobs: its API over HTTP on 127.0.0.1, its pods as processes.

What is POSTed is checked against Kubernetes' own schema and refused as the API server refuses it,
and run as the Job controller and the kubelet would: a pod for each index, at most `parallelism` at
once, a container that fails started again in its pod until `backoffLimit` failures. There is no
image, no volume and no scheduler: a container's command runs here, in a folder that stands for its
working directory.
"""

import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import kubernetes_validate
import psutil

JOBS = "/apis/batch/v1/namespaces/default/jobs"


class Refused(Exception):
    """The API's answer was no; the text is its message."""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Cluster:
    """The API server and what it runs.

    Args:
        folder: in place of each container's working directory.
        environment: what an image would bring along; a container's own `env` goes over it.

    Attributes:
        url: of the API.
        starts: indices in the order their containers were started.
        most_at_once: pods that ran at the same time.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, dict(environment)
        self.starts: list[int] = []
        self.most_at_once = 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._closing = False
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._answer(*cluster._create(self.path, body))

            def do_GET(self) -> None:
                self._answer(*cluster._read(self.path))

            def _answer(self, code: int, content: Mapping[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Not to the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._threads = [threading.Thread(target=self._server.serve_forever)]
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closing = True
            for pod in self._running.values():
                pod.terminate()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()

    def apply(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """POST a Job, as `kubectl create` does; what the API has made of it.

        Raises:
            Refused: it is not taken.
        """
        request = urllib.request.Request(
            self.url + JOBS, json.dumps(job).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                created: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            raise Refused(json.load(error)["message"]) from None
        return created

    def status(self, name: str) -> dict[str, Any]:
        """GET a Job: its status."""
        with urllib.request.urlopen(f"{self.url}{JOBS}/{name}", timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)["status"]
        return status

    def wait(self, name: str, timeout_s: float) -> str:
        """Until the Job has ended: `Complete` or `Failed`."""
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._jobs[name]["status"].get("conditions"), timeout_s
            )
        assert ended, f"{name} has not ended: {self.status(name)}"
        condition: str = self.status(name)["conditions"][0]["type"]
        return condition

    def kill(self, index: int) -> None:
        """SIGKILL of all processes of a pod's container, as when its memory is used up.

        The first goes last: its end is the container's, after which the pod starts another.
        """
        with self._changed:
            first = psutil.Process(self._running[index].pid)
            first.suspend()
            others = first.children(recursive=True)
            for process in others:
                process.kill()
            while any(map(_lives, others)):
                time.sleep(0.01)
            first.kill()

    def _create(self, path: str, job: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path != JOBS:
            return 404, {"message": f"found {path}; allowed: {JOBS}"}
        try:
            kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path))
            return 422, {"message": f"{where}: {error.message}"}
        name = job["metadata"]["name"]
        if name in self._jobs:
            return 409, {"message": f"{name} already exists"}
        self._jobs[name] = {**job, "status": {"active": 0, "succeeded": 0, "failed": 0}}
        self._threads.append(threading.Thread(target=self._control, args=[self._jobs[name]]))
        self._threads[-1].start()
        return 201, self._jobs[name]

    def _read(self, path: str) -> tuple[int, dict[str, Any]]:
        job = self._jobs.get(path.removeprefix(f"{JOBS}/"))
        return (404, {"message": f"{path}: not found"}) if job is None else (200, job)

    def _control(self, job: dict[str, Any]) -> None:
        """The Job controller: all pods, then the condition."""
        spec = job["spec"]
        with ThreadPoolExecutor(spec["parallelism"]) as pool:
            done = list(pool.map(lambda index: self._pod(job, index), range(spec["completions"])))
        with self._changed:
            kind = "Complete" if all(done) else "Failed"
            job["status"]["conditions"] = [{"type": kind, "status": "True"}]
            self._changed.notify_all()

    def _pod(self, job: dict[str, Any], index: int) -> bool:
        """Run the pod of an index; whether it succeeded."""
        status, limit = job["status"], job["spec"]["backoffLimit"]
        while True:
            with self._changed:
                if self._closing or status["failed"] > limit:
                    return False
                process = self._running[index] = self._start(job, index)
                self.starts.append(index)
                status["active"] = len(self._running)
                self.most_at_once = max(self.most_at_once, len(self._running))
                self._changed.notify_all()
            code = process.wait()
            with self._changed:
                del self._running[index]
                status["active"] = len(self._running)
                status["succeeded" if code == 0 else "failed"] += 1
                self._changed.notify_all()
            if code == 0:
                return True

    def _start(self, job: Mapping[str, Any], index: int) -> subprocess.Popen[bytes]:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        own = {entry["name"]: entry["value"] for entry in container.get("env", [])}
        own["JOB_COMPLETION_INDEX"] = str(index)
        with (self._folder / f"pod{index}.log").open("ab") as log:
            return subprocess.Popen(
                [*container["command"], *container.get("args", [])],
                cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**self._environment, **own},
            )  # fmt: skip
