"""What a request of the batched service can end in, beside its result."""


class ServiceError(Exception):
    """The batched service could not answer a request."""


class ServiceStopped(ServiceError):
    """The service is not running."""


class WorkerDied(ServiceError):
    """The worker process ended while the service was running."""


class WorkerTimeout(WorkerDied):
    """The worker process took longer than a limit allows, and was ended."""


class TransformError(ServiceError):
    """The transformer raised in the worker process, for one request or for its whole batch.

    Attributes:
        kind: the name of the exception's type in the worker.
        remote_traceback: the worker's traceback, "" for an error of a single request.
    """

    def __init__(self, kind: str, message: str, remote_traceback: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.remote_traceback = remote_traceback
