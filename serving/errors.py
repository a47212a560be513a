"""Errors of settings, and of requests, each with its gRPC status. Every message names the fix."""

import asyncio
import threading
from collections.abc import Callable, Sized
from concurrent.futures import Future

NOT_OURS = (KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError)
"""Exceptions that never count as the failure of one request. Other BaseExceptions do, such as a
panic of an extension module.
"""


MAX_SHOWN = 200
"""How many characters of a client's value a message repeats."""


def shown(value: object) -> str:
    """Returns the `repr` of a value for a message, cut at `MAX_SHOWN` characters.

    Long values are cut before formatting, so that a message about a megabyte stays cheap.
    """
    if isinstance(value, str | bytes) and len(value) > MAX_SHOWN:
        return f"{value[:MAX_SHOWN]!r}... ({len(value)} in all)"
    if isinstance(value, Sized) and len(value) > MAX_SHOWN:
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


class SettingsError(ValueError):
    """A setting that cannot be used. The message names the key, the value and valid ones."""


class ServingError(Exception):
    """Base of all errors that the engine reports to callers."""

    retry_after_s: float | None = None
    """After which to try again, where that is known; callers are told."""


class InvalidRequest(ServingError):
    """The request can never be served as it is: INVALID_ARGUMENT."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param` is the field at fault, of `Request` or `SamplingParams`, if it is one field."""
        super().__init__(message)
        self.param = param


class TooLong(InvalidRequest):
    """Prompt and output have more positions than the server has: INVALID_ARGUMENT."""


class RequestFailed(ServingError):
    """The server failed this request alone; others go on: INTERNAL."""


class Unauthenticated(ServingError):
    """The API key is missing or unknown: UNAUTHENTICATED."""


class PermissionDenied(ServingError):
    """The caller's key does not allow it: PERMISSION_DENIED."""


class NotFound(ServingError):
    """The request names a model that is not served: NOT_FOUND."""


class Overloaded(ServingError):
    """The queue is full: RESOURCE_EXHAUSTED, with the time after which to try again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(ServingError):
    """The engine is starting, draining or has failed: UNAVAILABLE."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLost(Unavailable):
    """A worker is gone that the request needs: UNAVAILABLE, with the time to try again after."""


class ModelUnloaded(Unavailable):
    """The request's model was unloaded while it was served: UNAVAILABLE."""


class DeadlineExceeded(ServingError):
    """The request's time ran out; its pages are free again: DEADLINE_EXCEEDED."""


class QueuedTooLong(DeadlineExceeded):
    """The request waited for its first step for longer than `queue_timeout_s`."""


class Aborted(ServingError):
    """The request was aborted by its caller or by an engine that stopped: CANCELLED."""


class ClientLeft(Aborted):
    """The client cancelled its request or closed its connection: CANCELLED."""


NAMED_WITHIN_S = 3.0
"""How long a failed step waits to hear whether it failed because a process is gone."""


class PeerLost(Unavailable):
    """Another process of the mesh is gone or has failed; nothing can be computed any more."""


class Lost:
    """Whether another process is gone, and who is to be told; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said = threading.Event()
        self._tell: list[Callable[[str], None]] = []
        self.reason = ""

    def say(self, reason: str) -> None:
        """Tells everybody who waits. Later reasons are consequences, and change nothing."""
        with self._lock:
            if self.reason:
                return
            self.reason, told = reason, list(self._tell)
        self._said.set()
        for tell in told:
            tell(reason)

    def watch(self, tell: Callable[[str], None]) -> None:
        """Has `tell` called once with the reason, in another thread than this one; at once where
        there is a reason already.
        """
        with self._lock:
            self._tell.append(tell)
            reason = self.reason
        if reason:
            threading.Thread(target=tell, args=(reason,), daemon=True).start()

    def named[T](self, call: Callable[[], T]) -> T:
        """Returns what `call` returns. Raises PeerLost where it fails since a process is gone.

        What its collectives raise then comes a little earlier than the reason does.
        """
        try:
            return call()
        except Exception as error:
            if isinstance(error, ValueError) or not self._said.wait(NAMED_WITHIN_S):
                raise  # bad input is bad in every process
            raise PeerLost(self.reason) from None

    def unless[T](self, call: Callable[[], T]) -> T:
        """Returns what `call` returns. Raises PeerLost as soon as a process is gone, though `call`
        may hang for ever: it runs in a thread of its own, which keeps no process alive.
        """
        done: Future[T] = Future()
        deciding = threading.Lock()

        def decide(how: Callable[[], None]) -> None:
            with deciding:
                if not done.done():
                    how()

        def run() -> None:
            try:
                found = self.named(call)
            except BaseException as error:
                failure = error
                decide(lambda: done.set_exception(failure))
            else:
                decide(lambda: done.set_result(found))

        self.watch(lambda reason: decide(lambda: done.set_exception(PeerLost(reason))))
        threading.Thread(target=run, name="jmoe-start", daemon=True).start()
        return done.result()
