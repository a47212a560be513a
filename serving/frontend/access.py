"""Who may call: what a key allows, asked by every front end alike.

Without `keys_file` everybody is `ANYBODY`.
"""

import contextlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from threading import Lock

from serving.errors import Overloaded, PermissionDenied, Unauthenticated, shown
from serving.frontend import keys
from serving.frontend.inbox import RETRY_AFTER_S
from serving.frontend.keys import Key
from serving.frontend.rates import Bucket
from serving.frontend.reload import Watched
from serving.request import Priority

log = logging.getLogger(__name__)

REASONS = ("admin", "metrics", "model", "class", "concurrency", "requests", "tokens")
"""Why what a key asked for was refused."""
_NOBODY = bytes(32)
_UNAUTHENTICATED = (
    "this server needs a key, and none that it knows was sent; send `authorization: Bearer KEY` "
    "(jmoe's own commands read it from the environment, JMOE_API_KEY)"
)

Clock = Callable[[], int]


class Caller:
    """Who a key belongs to, with what it has used."""

    def __init__(
        self,
        name: str = "",
        *,
        is_admin: bool = True,
        key: Key | None = None,
        clock: Clock = time.monotonic_ns,
    ) -> None:
        """`name` is what logs and metrics may show of a key; never the key.

        `key`: what it allows, in place of `is_admin`. `clock`: in nanoseconds, for its rates.
        """
        self.name, self._clock = name, clock
        self.key = Key("", admin=is_admin) if key is None else key
        self.num_requests = self.num_tokens = self.num_running = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._requests, self._tokens = Bucket(0), Bucket(0)
        self.change(self.key)

    def change(self, key: Key) -> None:
        """What it allows from now on; what was used stays used."""
        self.key, now_ns = key, self._clock()
        self._requests.change(key.requests_per_min, now_ns)
        self._tokens.change(key.tokens_per_min, now_ns)

    @property
    def is_admin(self) -> bool:
        """Whether it may administer."""
        return self.key.admin

    def require_admin(self) -> None:
        """Raises PermissionDenied for a key that may not administer."""
        if not self.is_admin:
            raise self._denied("admin", "this key is no admin key; use one that is")

    def require_metrics(self) -> None:
        """Raises PermissionDenied for a key that may not read metrics."""
        if not (self.is_admin or self.key.metrics):
            why = "this key may not read metrics; use an admin key, or one made with --metrics"
            raise self._denied("metrics", why)

    @contextlib.contextmanager
    def request(self, model: str, priority: Priority, count: int = 1) -> Iterator["Caller"]:
        """A request under way, of a served model's own name; `count`: several, asked for at once.

        Raises PermissionDenied for a model or class that is not this key's, or more at once than
        it may have; and as `check_room`.
        """
        self.check_allowed(model, priority, count)
        self.check_room(count)
        self._requests.take(count, self._clock())
        self.num_requests += count
        self.num_running += count
        try:
            yield self
        finally:
            self.num_running -= count

    def salt(self, own: str = "") -> str:
        """Of prefixes: who has another key shares none, nor with an `own` salt of another text."""
        return f"{self.key.sha256}:{own}" if self.key.sha256 or own else ""

    def used(self, num_tokens: int) -> None:
        """Tokens, of prompts and outputs, that count towards this key's rate."""
        self.num_tokens += num_tokens
        self._tokens.take(num_tokens, self._clock())

    def check_room(self, count: int = 1) -> None:
        """Raises Overloaded, with the time to come back, where rates or concurrency are used up.

        Cheap: who has no room is told before anything of a request is looked at.
        """
        key = self.key
        if key.concurrency and self.num_running + count > key.concurrency:
            # When one of them ends is not known; the time is that of a server without room.
            self.refused["concurrency"] += 1
            raise Overloaded(
                f"this key has {self.num_running} requests under way and may have "
                f"{key.concurrency}; try again when one has ended",
                RETRY_AFTER_S,
            )
        now_ns = self._clock()
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if wait_ns := bucket.wait_ns(now_ns):
                self.refused[what] += 1
                raise Overloaded(
                    f"this key has used its {bucket.per_minute} {what} a minute; try again in "
                    f"{wait_ns / 1e9:.3g} s",
                    wait_ns / 1e9,
                )

    def check_allowed(self, model: str, priority: Priority, count: int = 1) -> None:
        """Raises PermissionDenied for what this key may never ask."""
        key = self.key
        # Which models are served is no secret among those who have a key: `GetServerInfo` and
        # `/v1/models` say it. So a refusal says what it is, and not that the model is unknown.
        for what, wanted, allowed in (
            ("model", model, key.models),
            ("class", str(priority), key.classes),
        ):
            if allowed and wanted not in allowed:
                raise self._denied(what, _not_allowed(what, wanted, allowed))
        if key.concurrency and count > key.concurrency:
            raise self._denied(
                "concurrency",
                f"this key may have {key.concurrency} requests under way, and one call asks for "
                f"{count} answers; ask for fewer at once",
            )

    def _denied(self, reason: str, message: str) -> PermissionDenied:
        self.refused[reason] += 1
        return PermissionDenied(message)


def _not_allowed(what: str, wanted: str, allowed: Collection[str]) -> str:
    return f"this key may not use {what} {shown(wanted)}; it may use {', '.join(allowed)}"


ANYBODY = Caller()

current: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""Whose call a task works on. The guard of a port sets it before a message is received."""


class Access(Watched[dict[str, Key]]):
    """The keys of a server, as they are now. Without a file there are none, and nobody needs one.

    Any thread may ask for a caller. What a key has used stays used when the file is read again, by
    its name. A key that is gone from the file begins nothing more; what it has under way is
    finished: it was admitted, and its place in the batch is paid for.
    """

    def __init__(self, path: Path | None = None, clock: Clock = time.monotonic_ns) -> None:
        """Reads the file. Raises SettingsError for one that cannot be used."""
        self.num_unauthenticated = 0
        self.callers: dict[str, Caller] = {}  # by name; replaced as a whole, as is the next
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        self._path, self._clock, self._lock = path, clock, Lock()
        super().__init__("keys", [] if path is None else [path])
        if path is not None:
            self.use(self.read())

    def __repr__(self) -> str:
        return f"Access({len(self.callers)} keys)"

    def caller(self, authorization: str | None) -> Caller:
        """Who calls, by the value of an `authorization` header ("Bearer KEY").

        Raises Unauthenticated, the same for a key that is missing, malformed or unknown. All of
        them take the same steps as one that is known: a hash, a look-up by it, a comparison. Who
        measures their time learns of the hash of what they sent, which they know.
        """
        if self._path is None:
            return ANYBODY
        scheme, _, sent = (authorization or "").strip().partition(" ")
        found = keys.digest(sent.strip())
        stored, caller = self._by_digest.get(found, (_NOBODY, ANYBODY))
        is_known = hmac.compare_digest(found, stored)
        if not (is_known and scheme.lower() == "bearer"):
            with self._lock:
                self.num_unauthenticated += 1
            raise Unauthenticated(_UNAUTHENTICATED)
        return caller

    def read(self) -> dict[str, Key]:
        """See Watched. Raises SettingsError."""
        assert self._path is not None
        found = keys.read(self._path)
        if exposed := keys.exposure(self._path):
            log.warning(
                "%s; hashes give no key away, but who may write it can add keys: chmod 600 it",
                exposed,
            )
        return found

    def use(self, found: dict[str, Key]) -> None:
        """See Watched."""
        callers = {}
        for name, key in found.items():
            if (caller := self.callers.get(name)) is None:
                caller = Caller(name, key=key, clock=self._clock)
            elif caller.key != key:
                caller.change(key)
            callers[name] = caller
        by_digest = {}
        for caller in callers.values():
            stored = bytes.fromhex(caller.key.sha256)
            by_digest[stored] = stored, caller
        self.callers, self._by_digest = callers, by_digest
