"""Structured outputs: which tokens may come next, by llguidance.

A request's schema, expression or grammar becomes a matcher, which takes the tokens of its output
and says what may follow them as a bit a token. A structure is a caller's program: it is read in a
process of its own first (`serving.structure_check`), with bounds on time and memory, and its masks
have bounds, too. Nothing here runs on the device.
"""

import asyncio
import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jmoe.shape_rows import everything
from jmoe.tokenizer import Tokenizer
from serving.errors import NOT_OURS, InvalidRequest, Overloaded, RequestFailed, shown
from serving.request import Structure

READ_S = 3.0
"""How long a structure may take to be read."""
MAX_BYTES, MAX_KEPT_BYTES = 64 << 20, 256 << 20
"""Of memory that one structure may take, and those that are kept for the next request together."""
SHARE_S, BURST_S = 2e-3, 0.2
"""Processor time that one output may take for each of its tokens, and beyond that in all."""
MAX_WAITING = 64
"""Requests that wait until their structures are read."""
RETRY_AFTER_S = 1.0
STACK_BYTES = 8 << 20
"""Of the thread that reads what has been read in the other process, with half as much."""
_COMPLEX = ("ParserTooComplex", "LexerTooComplex")


class Matcher:
    """One output on its way."""

    def __init__(self, matcher: Any, forget: Callable[[], None]) -> None:
        """`matcher` is llguidance's, at its start. Copies of one share what they learn of it, a
        failure as well: `forget` is called where this one fails.
        """
        self._matcher, self._forget = matcher, forget
        self._left_s = BURST_S

    def take(self, token: int) -> bool:
        """The output's next token. True where it is complete: nothing can follow but its end.

        Raises InvalidRequest where the structure takes more work than is allowed, RequestFailed
        for a token that does not match, which the device does not draw.
        """
        began_s = time.thread_time()
        taken = self._matcher.consume_token(token)
        self._left_s -= time.thread_time() - began_s
        if self._matcher.is_error():
            self._failed()
        if not taken:
            raise RequestFailed(f"token {token} is not what the structure allows")
        return self._matcher.is_stopped()

    def fill(self, allowed: Int[np.ndarray, "W"]) -> None:
        """Sets the bits of tokens that may come next, the lowest bit of the first word first.

        Raises InvalidRequest where none may, or where that takes so long that others would wait.
        """
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._left_s += SHARE_S - (time.thread_time() - began_s)
        if self._matcher.is_error():
            self._failed()
        if self._left_s < 0:
            raise InvalidRequest(
                f"the structure takes more than {1e3 * SHARE_S:g} ms a token, in which all others "
                "wait; simplify it"
            )
        if not allowed.any():
            raise InvalidRequest("no token of this model continues the structure; loosen it")

    def _failed(self) -> None:
        from serving.grammars import said

        self._forget()
        why = said(self._matcher.get_error())
        if self._matcher.stop_reason() in _COMPLEX:
            raise InvalidRequest(f"the structure is too complex: {why}; simplify it")
        raise InvalidRequest(f"the structure cannot be followed: {why}")


class Structures:
    """What one model's vocabulary makes of structures."""

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """Tokens from `vocab_size` on, and such as the tokenizer does not know, are never drawn."""
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos = list(eos_token_ids)
        self._kept: OrderedDict[Structure, tuple[Any, int]] = OrderedDict()  # and their bytes
        self._reader = asyncio.Lock()  # one structure is read at a time
        self._checker: asyncio.subprocess.Process | None = None
        self.num_waiting = 0

    async def matcher(self, structure: Structure) -> Matcher:
        """A matcher at its start.

        Raises InvalidRequest for a structure that cannot be read, or not with so much time and
        memory; Overloaded where too many wait for theirs.
        """
        if self._tokenizer is None or not self._eos:
            what = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise InvalidRequest(f"a structured output needs a {what}; this model has none")
        if self.num_waiting >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} requests wait until their structures are read; try again later",
                RETRY_AFTER_S,
            )
        self.num_waiting += 1
        try:
            async with self._reader:
                kept = self._kept.get(structure) or await self._read(structure)
        finally:
            self.num_waiting -= 1
        self._keep(structure, *kept)
        return Matcher(kept[0].deep_copy(), lambda: self._drop(structure))

    async def close(self) -> None:
        """Ends the other process."""
        checker, self._checker = self._checker, None
        if checker is not None and checker.returncode is None:
            checker.kill()
            await checker.communicate()

    def _keep(self, structure: Structure, matcher: Any, num_bytes: int) -> None:
        self._kept[structure] = matcher, num_bytes
        self._kept.move_to_end(structure)
        while sum(size for _, size in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def _drop(self, structure: Structure) -> None:
        self._kept.pop(structure, None)

    async def _read(self, structure: Structure) -> tuple[Any, int]:
        """In the other process, and where that went well, here."""
        num_bytes = await self._check(structure)
        matcher, error = await asyncio.wrap_future(_in_thread(self._parsed, structure))
        if error is not None:
            raise _unreadable(structure, error)
        return matcher, num_bytes + len(structure.text)

    async def _check(self, structure: Structure) -> int:
        """Bytes that it takes. Raises InvalidRequest."""
        try:
            checker = await self._started()
            assert checker.stdin is not None
            assert checker.stdout is not None
            asked = {"kind": structure.kind.value, "text": structure.text}
            async with asyncio.timeout(READ_S):
                checker.stdin.write(json.dumps(asked).encode() + b"\n")
                await checker.stdin.drain()
                line = await checker.stdout.readline()
            found = json.loads(line)  # nothing: it has ended
        except (TimeoutError, OSError, ValueError):
            await self.close()
            raise _unreadable(
                structure, f"reading it takes more than {READ_S:g} s, or too much memory; simplify"
            ) from None
        except BaseException:  # whoever asked has left: the answer would be another's
            await self.close()
            raise
        if found["error"] is not None:
            raise _unreadable(structure, found["error"])
        if found["bytes"] > MAX_BYTES:
            await self.close()
            raise _unreadable(structure, f"it takes {found['bytes'] >> 20} MiB; simplify")
        return found["bytes"]

    async def _started(self) -> asyncio.subprocess.Process:
        if self._checker is None or self._checker.returncode is not None:
            self._checker = checker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "serving.structure_check"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=1 << 20,
            )
            assert checker.stdin is not None
            checker.stdin.write(json.dumps(self._facts).encode() + b"\n")
            await checker.stdin.drain()
            assert checker.stdout is not None
            await checker.stdout.readline()  # it has read the vocabulary
        return self._checker

    @cached_property
    def _facts(self) -> dict[str, Any]:
        assert self._tokenizer is not None
        text = self._tokenizer.backend.to_str()
        return {"tokenizer": text, "vocab_size": self._vocab_size, "eos": self._eos}

    @cached_property
    def _vocabulary(self) -> Any:
        from serving.grammars import Vocabulary

        return Vocabulary(**self._facts)

    def _parsed(self, structure: Structure) -> tuple[Any, str | None]:
        return self._vocabulary.read(structure.kind.value, structure.text)


def _in_thread[T](call: Callable[..., T], *arguments: Any) -> "Future[T]":
    """A call in a thread of its own, which keeps no process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:  # a panic of an extension module is no Exception
            future.set_exception(RequestFailed(f"the structure could not be read: {error}"))

    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=run, name="jmoe-structure", daemon=True).start()
    finally:
        threading.stack_size(before)
    return future


def allowed_tokens(
    sequences: Sequence[Any], drawn: Sequence[bool], vocab_size: int, end: Callable[..., None]
) -> Int[np.ndarray, "B W"]:
    """What the rows of a step may draw, now that the tokens before are read.

    A sequence whose structure cannot be followed gets its error by `end(sequence, error)`.
    """
    allowed = everything(len(sequences), vocab_size)
    for row, sequence, is_drawn in zip(allowed, sequences, drawn, strict=True):
        if sequence.matcher is None or sequence.done or not is_drawn:
            continue
        try:
            sequence.matcher.fill(row)
        except InvalidRequest as error:
            row[:] = -1
            end(sequence, error)
        except NOT_OURS:
            raise
        except BaseException as error:  # a panic of an extension module is no Exception
            row[:] = -1
            end(sequence, RequestFailed(f"the structure's mask failed: {error}"))
    return allowed


def _unreadable(structure: Structure, why: str) -> InvalidRequest:
    kind = structure.kind.replace("_", " ")
    return InvalidRequest(f"the {kind} {shown(structure.text)} cannot be used: {why}")
