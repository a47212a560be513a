"""`python -m serving.intake.limited_child KIND`: the process that `limited_process` starts for what
others wrote.

A structure or a chat template is in effect a program of a stranger. It may crash the process that
compiles it (parsers are recursive), or take minutes or gigabytes. Here that does no harm.

Messages are JSON behind their length, 4 bytes. The first on standard input holds the facts, which
are trusted, and is answered by `{}` once they are in force. Every further one is a question, whose
answer has an `error`, null if there was none.
"""

import importlib.util
import os
import resource
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

STACK_BYTES = 4 << 20
"""Half the stack of the server's thread, so that whatever compiles here also compiles there."""
MAX_ERROR_CHARS = 300

type Answer = Callable[[dict[str, Any]], dict[str, Any]]


def _structures(facts: dict[str, Any]) -> Answer:
    """Returns a function that answers `{"kind": kind, "text": text}` with the bytes that compiling
    took.
    """
    from serving.intake.grammars import Vocabulary

    vocabulary = Vocabulary(**facts)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        before = _memory_bytes()[1]
        _, error = vocabulary.read(asked["kind"], asked["text"])
        return {"error": error, "bytes": max(0, _memory_bytes()[1] - before)}

    return answer


def _chats(facts: dict[str, Any]) -> Answer:
    """Returns a function that answers `{"template": name, "messages": list, "options": names}` with
    the text, up to `max_chars` and a piece; without messages it compiles the template only.
    """
    # jmoe itself imports jax, which takes a second and 100 MB; this is one module of it.
    spec = importlib.util.find_spec("jmoe")
    assert spec is not None
    package = types.ModuleType("jmoe")
    package.__path__ = spec.submodule_search_locations or []
    sys.modules["jmoe"] = package
    from jmoe.chat_template import ChatTemplate, ChatTemplateError

    compiled: dict[str, ChatTemplate] = {}

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        try:
            name = asked.pop("template")
            if name not in compiled:  # at the first question, since limits hold from there
                compiled[name] = ChatTemplate(facts["templates"][name], facts["special_tokens"])
            pieces: list[str] = []
            num_chars = 0
            for piece in compiled[name].pieces(**asked) if asked else ():
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > facts["max_chars"]:
                    return {"error": None, "text": "", "num_chars": num_chars}
            return {"error": None, "text": "".join(pieces), "num_chars": num_chars}
        except ChatTemplateError as error:
            return {"error": str(error)[:MAX_ERROR_CHARS]}

    return answer


_KINDS = {"structures": _structures, "chats": _chats}


def _memory_bytes() -> tuple[int, int]:
    """Returns this process's memory: its addresses, and what is resident of them."""
    addressed, resident, *_ = map(int, Path("/proc/self/statm").read_text("ascii").split())
    return addressed * resource.getpagesize(), resident * resource.getpagesize()


def _read() -> dict[str, Any]:
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:  # the server closed its end, or is gone
        os._exit(0)
    return orjson.loads(sys.stdin.buffer.read(int.from_bytes(head)))


def _write(answer: dict[str, Any]) -> None:
    try:
        message = orjson.dumps(answer)
    except TypeError as error:  # half a surrogate pair
        message = orjson.dumps({"error": f"the text is not Unicode: {error}"})
    sys.stdout.buffer.write(len(message).to_bytes(4) + message)
    sys.stdout.buffer.flush()


def _run(kind: str) -> None:
    facts = _read()
    limit_s, room_bytes = facts.pop("limit_s"), facts.pop("room_bytes")
    answer = _KINDS[kind](facts)
    most = _memory_bytes()[0] + room_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _write({})  # from now on, the server times answers
    while True:
        asked = _read()
        # The server kills a process that takes too long, unless it has been killed itself.
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            found = answer(asked)
        except MemoryError:
            found = {"error": f"it takes more than {room_bytes >> 20} MiB of memory", "ends": True}
        except RecursionError:
            found = {"error": "it is nested too deeply"}
        _write(found)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if "ends" in found:
            os._exit(0)  # gives its memory back


def main() -> None:
    """Answers questions until its input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the server ends this process
        signal.signal(name, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_run, args=(sys.argv[1],), name="answer")
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
