"""What can go wrong with a request, by the status a caller sees. Each message names the fix."""


class ServingError(Exception):
    """Base of all errors that a caller of the engine may see."""


class InvalidRequest(ServingError):
    """The request can never be served as it is: INVALID_ARGUMENT."""


class NotFound(ServingError):
    """The request names a model that is not served: NOT_FOUND."""


class Overloaded(ServingError):
    """The queue is full: RESOURCE_EXHAUSTED, with the time after which to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(ServingError):
    """The engine is starting, draining or has failed: UNAVAILABLE."""


class DeadlineExceeded(ServingError):
    """The request's time ran out; its pages are free again: DEADLINE_EXCEEDED."""


class Aborted(ServingError):
    """The request was aborted by its caller or by an engine that stopped: CANCELLED."""
