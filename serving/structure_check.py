"""Compiles structures in a separate process before the server does: `python -m
serving.structure_check`.

A structure is in effect a client's program. It may crash the process that compiles it (the parser
is recursive), or take minutes or gigabytes. Here that does no harm: `serving.structure` kills a
process that takes too long, and starts another.

The first line on standard input is `{"tokenizer": text, "vocab_size": n, "eos": [ids]}`, answered
by `{}` once the vocabulary is ready. Every further line is `{"kind": kind, "text": text}`, answered
by `{"error": text or null, "bytes": n}`.
"""

import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from serving.grammars import Vocabulary

STACK_BYTES = 4 << 20
"""Half the stack of the server's thread, so that whatever compiles here also compiles there."""
ROOM_BYTES = 1 << 30
"""Address space that this process may take beyond what it has at the start."""


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(vocabulary: Vocabulary, line: str) -> dict[str, Any]:
    asked, before = json.loads(line), _resident()
    _, error = vocabulary.read(asked["kind"], asked["text"])
    return {"error": error, "bytes": max(0, _resident() - before)}


def _run() -> None:
    vocabulary = Vocabulary(**json.loads(sys.stdin.readline()))
    _limit_memory()
    print("{}", flush=True)  # from now on, the server times answers
    for line in sys.stdin:
        print(json.dumps(_answer(vocabulary, line)), flush=True)


def main() -> None:
    """Answers requests until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_run, name="read")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
