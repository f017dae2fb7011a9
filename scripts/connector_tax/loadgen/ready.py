"""Before a run: does the endpoint answer, and which model does it serve?"""

import sys
import time

import httpx

from connector_tax.loadgen.endpoint import Target
from connector_tax.loadgen.messages import LoadGeneratorError
from connector_tax.loadgen.sse import excerpt
from connector_tax.loadgen.tls import TlsClient

PAUSE_S = 0.2
ANSWER_S = 10.0


def wait_ready(target: Target, model: str | None, wait_s: float) -> str:
    """Wait until the endpoint answers; return the model to ask for.

    GET of the list of models that belongs to the path; any HTTP answer but 502, 503 and 504, which
    a proxy gives for a server that is starting, means ready. A model that is not in the list is
    warned of: servers have aliases.

    Args:
        model: the one the user names; None: the only one of the list.

    Raises:
        LoadGeneratorError: no answer within `wait_s`, no permission, or the model cannot be told.
    """
    path = target.path.partition("?")[0]
    base = path.removesuffix("/chat/completions").removesuffix("/completions")
    listed = base != path
    answer = _answer(target, f"{base}/models" if listed else path, wait_s)
    if answer.status_code in (401, 403):
        raise LoadGeneratorError(
            f"{answer.url} answers {answer.status_code}: {excerpt(answer.content)}; "
            "give a key with --api-key-env or --header"
        )
    names = _models(answer) if listed else []
    if model is None:
        if len(names) != 1:
            text = f" {excerpt(answer.content)}".rstrip()
            said = ", ".join(names) or f"no model (status {answer.status_code}){text}"
            raise LoadGeneratorError(f"{answer.url} names {said}; say which with --model")
        return names[0]
    if names and model not in names:
        print(f"warning: {answer.url} names {', '.join(names)}, not {model}", file=sys.stderr)
    return model


def _answer(target: Target, path: str, wait_s: float) -> httpx.Response:
    tls = target.tls
    verify = True if tls is None else TlsClient(tls.name, tls.ca_file, tls.insecure).context
    host = f"[{target.host}]" if ":" in target.host else target.host
    url = f"{'http' if tls is None else 'https'}://{host}:{target.port}{path}"
    headers = {n.encode(): value.encode("latin-1") for n, value in target.headers.items()}
    deadline = time.monotonic() + wait_s
    with httpx.Client(verify=verify, headers=headers, trust_env=False, timeout=ANSWER_S) as client:
        while True:
            try:
                answer = client.get(url)
                problem = f"status {answer.status_code}"
                if answer.status_code not in (502, 503, 504):
                    return answer
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() >= deadline:
                raise LoadGeneratorError(f"{url} did not answer within {wait_s:g} s: {problem}")
            time.sleep(PAUSE_S)


def _models(answer: httpx.Response) -> list[str]:
    if answer.status_code != httpx.codes.OK:
        return []
    try:
        return [str(entry["id"]) for entry in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        return []
