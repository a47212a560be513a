"""Authentication and authorization by API key, shared by all front ends.

Without `keys_file` every caller is `ANYBODY`.
"""

import contextlib
import hmac
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path

from serving.errors import Overloaded, PermissionDenied, Unauthenticated, shown
from serving.frontend import keys
from serving.frontend.inbox import RETRY_AFTER_S
from serving.frontend.keys import Key
from serving.frontend.reload import Watched
from serving.request import Priority

MINUTE_NS = 60_000_000_000


class Bucket:
    """A token bucket that holds one minute's worth, so a burst may use that much; full at first.

    Times are whole nanoseconds of the caller's clock, so that a client which returns exactly when
    told to, and no earlier, is admitted.
    """

    def __init__(self, per_minute: int) -> None:
        """`per_minute`: 0 sets no limit."""
        self.per_minute = per_minute
        self._full_at_ns = 0  # when the bucket will be full again

    def wait_ns(self, now_ns: int) -> int:
        """Returns how long until one token can be taken; 0: now."""
        if not self.per_minute:
            return 0
        return max(0, self._from(now_ns) + self._cost_ns(1) - MINUTE_NS - now_ns)

    def take(self, count: int, now_ns: int) -> None:
        """Takes `count` tokens, even more than there are; later calls wait until the debt is
        repaid.
        """
        if self.per_minute:
            self._full_at_ns = self._from(now_ns) + self._cost_ns(count)

    def change(self, per_minute: int, now_ns: int) -> None:
        """Changes the rate from now on; the number of tokens missing from the bucket is kept."""
        missing_ns = max(0, self._full_at_ns - now_ns)
        missing = missing_ns * self.per_minute // MINUTE_NS
        self.per_minute, self._full_at_ns = per_minute, 0
        self.take(missing, now_ns)

    def _from(self, now_ns: int) -> int:
        return max(now_ns, self._full_at_ns)

    def _cost_ns(self, count: int) -> int:
        return -(-count * MINUTE_NS // self.per_minute)


log = logging.getLogger(__name__)

REASONS = ("admin", "metrics", "generate", "model", "class", "concurrency", "requests", "tokens")
"""Reasons for refusing a call with a valid key."""
DEFAULT_CLASS = Priority.LATENCY_SENSITIVE
"""Of a request that names none, if its key may use it."""
MAX_NAMED = 10
"""How many of the keys that are gone the log names."""
_NOBODY = bytes(32)
_UNAUTHENTICATED = (
    "this server needs a key, and none that it knows was sent; send `authorization: Bearer KEY` "
    "(jmoe's own commands read it from the environment, JMOE_API_KEY)"
)

Clock = Callable[[], int]


class Caller:
    """The holder of an API key: what the key allows, and what it has used."""

    def __init__(
        self, name: str = "", key: Key = Key("", admin=True), clock: Clock = time.monotonic_ns
    ) -> None:
        """`name` identifies the key in logs and metrics, which never show the key itself.

        `key` says what the key allows. `clock` returns nanoseconds, for the rate limits.
        """
        self.name, self._clock = name, clock
        self.num_requests = self.num_tokens = self.num_running = 0
        self.refused: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self._requests, self._tokens = Bucket(0), Bucket(0)
        self.change(key)

    def change(self, key: Key) -> None:
        """Replaces what the key allows; what it has used stays counted."""
        self.key, now_ns = key, self._clock()
        self._requests.change(key.requests_per_min, now_ns)
        self._tokens.change(key.tokens_per_min, now_ns)

    def require_admin(self) -> None:
        """Raises PermissionDenied unless the key is an admin key."""
        if not self.key.admin:
            raise self._denied("admin", "this key is no admin key; use one that is")

    def require_metrics(self) -> None:
        """Raises PermissionDenied unless the key may read metrics."""
        if not (self.key.admin or self.key.metrics):
            why = "this key may not read metrics; use an admin key, or one made with --metrics"
            raise self._denied("metrics", why)

    @contextlib.contextmanager
    def request(self, model: str, priority: Priority | None, count: int = 1) -> Iterator["Caller"]:
        """Counts `count` requests to `model` (its served name) as running within the block; those
        of no class (None) generate nothing.

        Raises PermissionDenied if the key does not allow the model, the class or so many concurrent
        requests, and Overloaded as `check_room` does.
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

    def class_of(self, named: Priority | None) -> Priority:
        """Returns the class of a request that names this one; None: the default, or the key's
        first, if it may not use that.
        """
        allowed = self.key.classes
        if named is None and allowed and DEFAULT_CLASS not in allowed:
            return allowed[0]
        return named or DEFAULT_CLASS

    def salt(self, own: str = "") -> str:
        """Returns the prefix cache's salt: different keys, or different `own` salts, share no
        pages.
        """
        return f"{self.key.sha256}:{own}" if self.key.sha256 or own else ""

    def used(self, num_tokens: int) -> None:
        """Counts prompt and output tokens towards the key's rate limit."""
        self.num_tokens += num_tokens
        self._tokens.take(num_tokens, self._clock())

    def check_room(self, count: int = 1) -> None:
        """Raises Overloaded, with a retry time, if the key's rate or concurrency limit is reached,
        and PermissionDenied if it may not generate at all.

        The check is cheap, so that it can be made before a request is read.
        """
        key = self.key
        if not key.generates:
            raise self._denied(
                "generate",
                "this key reads metrics and does nothing else; use one made without --metrics, or "
                "with what it may generate: models, classes, or a limit",
            )
        if key.concurrency and self.num_running + count > key.concurrency:
            # It is not known when a request will end, so use the retry time of an overloaded
            # server.
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

    def check_allowed(self, model: str, priority: Priority | None, count: int = 1) -> None:
        """Raises PermissionDenied for a request that this key can never make. Notes the model that
        was asked for.
        """
        asked_model.set(model)
        key = self.key
        # Anybody with a key can list the served models (`GetServerInfo`, `/v1/models`), so the
        # error need not hide that the model exists.
        for what, wanted, allowed in (
            ("model", model, key.models),
            ("class", priority and str(priority), key.classes),
        ):
            if allowed and wanted is not None and wanted not in allowed:
                may = f"it may use {', '.join(allowed)}"
                raise self._denied(what, f"this key may not use {what} {shown(wanted)}; {may}")
        if key.concurrency and count > key.concurrency:
            raise self._denied(
                "concurrency",
                f"this key may have {key.concurrency} requests under way, and one call asks for "
                f"{count} answers; ask for fewer at once",
            )

    def _denied(self, reason: str, message: str) -> PermissionDenied:
        self.refused[reason] += 1
        return PermissionDenied(message)


ANYBODY = Caller()

current: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)
"""The caller that a task or thread serves, as soon as it is known."""
asked_model: ContextVar[str] = ContextVar("asked_model", default="")
"""The served name of the model whose answer is asked for, likewise."""


class Access(Watched[dict[str, Key]]):
    """A server's current API keys. Without a file there are none, and callers need none.

    `caller` is thread-safe. When the file is read again, usage is kept by key name. A key that was
    removed from the file cannot start new requests; those it has running are finished.
    """

    def __init__(self, path: Path | None = None, clock: Clock = time.monotonic_ns) -> None:
        """Reads the file. Raises SettingsError for one that cannot be used."""
        self.callers: dict[str, Caller] = {}  # by name; replaced, never changed, like the next
        self._by_digest: dict[bytes, tuple[bytes, Caller]] = {}
        self._path, self._clock = path, clock
        super().__init__("keys", [] if path is None else [path])
        if path is not None:
            self.use(self.read())

    def __repr__(self) -> str:
        return f"Access({len(self.callers)} keys)"

    def caller(self, authorization: str | None) -> Caller:
        """Returns the caller for the value of an `authorization` header ("Bearer KEY"), and notes
        it as `current`.

        Raises the same Unauthenticated for a missing, malformed or unknown key. All cases take the
        same steps as a known key: a hash, a look-up by the hash, a comparison. So timing reveals
        nothing but the hash of what the caller sent.
        """
        current.set(ANYBODY)  # and nothing of a call before it is left over
        asked_model.set("")
        if self._path is None:
            return ANYBODY
        scheme, _, sent = (authorization or "").strip().partition(" ")
        found = keys.digest(sent.strip())
        stored, caller = self._by_digest.get(found, (_NOBODY, ANYBODY))
        is_known = hmac.compare_digest(found, stored)
        if not (is_known and scheme.lower() == "bearer"):
            raise Unauthenticated(_UNAUTHENTICATED)
        current.set(caller)
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
                caller = Caller(name, key, self._clock)
            elif caller.key != key:
                caller.change(key)
            callers[name] = caller
        by_digest = {}
        for caller in callers.values():
            stored = bytes.fromhex(caller.key.sha256)
            by_digest[stored] = stored, caller
        self._warn_of_gone(by_digest)
        self.callers, self._by_digest = callers, by_digest

    def _warn_of_gone(self, left: Collection[bytes]) -> None:
        """Warns about keys that are no longer there, and about a file that has none."""
        before = len(self._by_digest)
        gone = [
            caller.name for stored, (_, caller) in self._by_digest.items() if stored not in left
        ]
        if gone:
            names = ", ".join(sorted(gone)[:MAX_NAMED]) + ", ..." * (len(gone) > MAX_NAMED)
            log.warning(
                "%d of %d keys are gone (%s); %s in %s",
                *(len(gone), before, names, f"{len(left)} are there" if left else "none is left"),
                self._path,
                extra={"event": "keys_gone", "gone": len(gone), "left": len(left)},
            )
        elif not left:
            log.warning(
                "%s has no keys, so that every caller is refused; make one with "
                "`jmoe keys new NAME --file %s`",
                *(self._path, self._path),
            )
