"""Sets up logging to stderr, as text or as one JSON object per line."""

import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = "jmoe"  # name of the handler that `configure` adds
_request_id: ContextVar[str] = ContextVar("jmoe_request_id", default="")
_FOREIGN = "stderr"  # logger of lines that are not ours
_ABSL = re.compile(rb"([IWEF])\d{4} ")
"""How absl's lines begin, those of gRPC and XLA, by level."""
_LEVELS = {b"I": logging.INFO, b"W": logging.WARNING, b"E": logging.ERROR, b"F": logging.CRITICAL}
_MAX_LINE_BYTES = 1 << 16
_relay: "subprocess.Popen[bytes] | None" = None
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (UTC), level, logger, message, the id of the request
    that it is about, and the fields of `extra`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line, whatever the message contains."""
        at = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id.get():
            entry["request_id"] = request_id
        extra = {key: _value(v) for key, v in vars(record).items() if key not in _STANDARD}
        entry |= extra
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str, ensure_ascii=False)


def _value(value: object) -> object:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def configure(log_format: str = "text", *, verbose: bool = False) -> None:
    """Sets up logging to stderr; a later call changes what an earlier one set.

    If the root logger has handlers of its own already, only the level is set.
    """
    root = logging.getLogger()
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.name = _OWN
        root.addHandler(handler)
    if (own := _handler()) is not None:
        own.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(_TEXT))
    logging.getLogger("serving").setLevel(logging.DEBUG if verbose else logging.INFO)


def wrap_stderr() -> None:
    """Makes a JSON record of each line that libraries write to stderr, from C as well.

    A process does it, which has their last words of a crash, too, and does not need the
    interpreter's lock, which a library may hold while it writes. Records of `logging` go past it.
    """
    global _relay
    own = _handler()
    if _relay is not None or not isinstance(own, logging.StreamHandler):
        return
    command = sys.executable, "-m", "serving.telemetry.logs"
    _relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert _relay.stdin is not None
    own.setStream(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace"))
    os.dup2(_relay.stdin.fileno(), 2)
    _relay.stdin.close()


def _relay_lines() -> None:
    """Writes lines of stdin to stderr as JSON until all that could write them have ended."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    configure("json")
    foreign = logging.getLogger(_FOREIGN)
    foreign.setLevel(logging.INFO)
    while line := sys.stdin.buffer.readline(_MAX_LINE_BYTES):
        if text := line.decode(errors="replace").rstrip():
            prefix = _ABSL.match(line)
            level = logging.WARNING if prefix is None else _LEVELS[prefix[1]]
            foreign.log(level, "%s", text)


def note_request(request_id: str) -> None:
    """Adds a request's id to all that this task, and the tasks it starts, log from now on.

    Front ends have a task for each request. A line about another task's request has the id in
    `extra`.
    """
    _request_id.set(request_id)


def is_json() -> bool:
    """Returns whether `configure` was asked for JSON."""
    own = _handler()
    return own is not None and isinstance(own.formatter, JsonFormatter)


def say(text: str, level: int = logging.INFO) -> None:
    """Writes a line to stderr as it is, or as a JSON object if logs are JSON."""
    if is_json():
        logging.getLogger("serving").log(level, "%s", text)
    else:
        print(text, file=sys.stderr, flush=True)


def _handler() -> logging.Handler | None:
    return next((h for h in logging.getLogger().handlers if h.name == _OWN), None)


if __name__ == "__main__":
    _relay_lines()
