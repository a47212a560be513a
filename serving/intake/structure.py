"""Structured outputs: computes which tokens may come next, with llguidance.

A request's schema, regular expression or grammar is compiled to a matcher, which takes the tokens
of the output and returns a bit mask of the tokens that may follow. Since a structure is in effect a
client's program, it is first compiled in a separate process (`limited_process`) with limits on time
and memory; computing masks is limited, too. Nothing here runs on the device.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Int

from jmoe.api import Model
from jmoe.packed_rows import everything
from serving.errors import NOT_OURS, InvalidRequest, Overloaded, RequestFailed, shown
from serving.intake.limited_process import LimitedProcess, LimitExceeded
from serving.request import Structure

READ_S = 3.0
"""Time limit for compiling a structure."""
ROOM_BYTES = 1 << 30
"""Memory that compiling may take."""
MAX_BYTES, MAX_KEPT_BYTES = 64 << 20, 256 << 20
"""Memory limits: of one structure, and of all that are cached for further requests."""
SHARE_S, BURST_S = 2e-3, 0.2
"""CPU time that one output's masks may take: per token, and additionally in all."""
MAX_WAITING = 64
"""How many requests may wait for their structures to be compiled."""
RETRY_AFTER_S = 1.0
STACK_BYTES = 8 << 20
"""Stack size of the compiling thread: twice that of the other process, which compiled it first."""
_COMPLEX = ("ParserTooComplex", "LexerTooComplex")


class Matcher:
    """The matcher of one output in progress."""

    def __init__(self, matcher: Any, forget: Callable[[], object]) -> None:
        """`matcher` is llguidance's, in its initial state.

        Copies of a matcher share what they learn, including a failure, so `forget` is called if
        this one fails.
        """
        self._matcher, self._forget = matcher, forget
        self._left_s = BURST_S

    def take(self, token: int) -> bool:
        """Takes the output's next token; returns True if only the end can follow.

        Raises InvalidRequest if the structure takes too much work, and RequestFailed for a token
        that does not match, which the device should never draw.
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
        """Sets the bits of the tokens that may come next; token 0 is the first word's lowest bit.

        Raises InvalidRequest if no token may follow, or if this takes so long that others would
        wait.
        """
        began_s = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        self._left_s += SHARE_S - (time.thread_time() - began_s)
        if self._matcher.is_error():
            self._failed()
        if self._left_s < 0:
            raise InvalidRequest(
                f"the structure takes more than {1e3 * SHARE_S:g} ms a token, in which all others "
                "wait; simplify it",
                "structure",
            )
        if not allowed.any():
            raise InvalidRequest(
                "no token of this model continues the structure; loosen it", "structure"
            )

    def _failed(self) -> None:
        from serving.intake.grammars import said

        self._forget()
        why = said(self._matcher.get_error())
        if self._matcher.stop_reason() in _COMPLEX:
            raise InvalidRequest(f"the structure is too complex: {why}; simplify it", "structure")
        raise InvalidRequest(f"the structure cannot be followed: {why}", "structure")


class Structures:
    """Compiles and caches structures for one model's vocabulary."""

    def __init__(self, model: Model) -> None:
        """Tokens from the model's `vocab_size` on, and those unknown to its tokenizer, are never
        drawn.
        """
        self._tokenizer, self._vocab_size = model.tokenizer, model.config.vocab_size
        self._eos = list(model.config.eos_token_ids)
        self._kept: OrderedDict[Structure, tuple[Any, int]] = OrderedDict()  # matcher and bytes
        self._reader = asyncio.Lock()  # one structure is compiled at a time
        self._checker = LimitedProcess("structures", lambda: self._facts, READ_S, ROOM_BYTES)
        self.num_waiting = 0

    async def matcher(self, structure: Structure) -> Matcher:
        """Returns a new matcher for a structure.

        One that is cached waits for no others. Raises InvalidRequest for a structure that is
        invalid or takes too much time or memory, and Overloaded if too many requests wait for
        theirs.
        """
        if self._tokenizer is None or not self._eos:
            what = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise InvalidRequest(
                f"a structured output needs a {what}; this model has none", "structure"
            )
        kept = self._kept.get(structure) or await self._in_turn(structure)
        self._keep(structure, *kept)
        return Matcher(kept[0].deep_copy(), lambda: self._kept.pop(structure, None))

    async def close(self) -> None:
        """Ends the checking process."""
        await self._checker.close()

    def _keep(self, structure: Structure, matcher: Any, num_bytes: int) -> None:
        self._kept[structure] = matcher, num_bytes
        self._kept.move_to_end(structure)
        while sum(size for _, size in self._kept.values()) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    async def _in_turn(self, structure: Structure) -> tuple[Any, int]:
        """Compiles a structure behind those that came before, unless one of them was the same."""
        if self.num_waiting >= MAX_WAITING:
            raise Overloaded(
                f"{MAX_WAITING} requests wait until their structures are read; try again later",
                RETRY_AFTER_S,
            )
        self.num_waiting += 1
        try:
            async with self._reader:
                return self._kept.get(structure) or await self._read(structure)
        finally:
            self.num_waiting -= 1

    async def _read(self, structure: Structure) -> tuple[Any, int]:
        """Compiles a structure in the other process and, if that succeeds, here. Returns
        llguidance's matcher, and the bytes of memory that it takes. Raises InvalidRequest.
        """
        asked = {"kind": structure.kind.value, "text": structure.text}
        try:
            found = await self._checker.ask(asked)
        except (LimitExceeded, TypeError) as error:
            raise _unreadable(structure, f"{error}; simplify") from None
        if found["error"] is not None:
            raise _unreadable(structure, found["error"])
        if found["bytes"] > MAX_BYTES:
            await self._checker.close()
            raise _unreadable(structure, f"it takes {found['bytes'] >> 20} MiB; simplify")
        reading = _in_thread(lambda: self._vocabulary.read(**asked))
        matcher, error = await asyncio.wrap_future(reading)
        if error is not None:
            raise _unreadable(structure, error)
        return matcher, found["bytes"] + len(structure.text)

    @cached_property
    def _facts(self) -> dict[str, Any]:
        assert self._tokenizer is not None
        text = self._tokenizer.backend.to_str()
        return {"tokenizer": text, "vocab_size": self._vocab_size, "eos": self._eos}

    @cached_property
    def _vocabulary(self) -> Any:
        from serving.intake.grammars import Vocabulary

        return Vocabulary(**self._facts)


def _in_thread[T](call: Callable[[], T]) -> "Future[T]":
    """Makes a call in a new daemon thread."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # who asked may go; the call ends all the same

    def run() -> None:
        try:
            future.set_result(call())
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
    """Returns the mask of tokens that each row of a step may draw, once previous tokens are read.

    `end(sequence, error)` is called for a sequence whose structure cannot be followed.
    """
    allowed = everything(len(sequences), vocab_size)
    for row, sequence, is_drawn in zip(allowed, sequences, drawn, strict=True):
        if not sequence.is_held or sequence.done or not is_drawn:
            continue
        try:
            if sequence.matcher is not None:
                sequence.matcher.fill(row)
            _forbid(row, sequence.barred_token_ids)
        except NOT_OURS:
            raise
        except BaseException as error:  # a panic of an extension module is no Exception
            row[:] = -1
            failed = RequestFailed(f"the structure's mask failed: {error}")
            end(sequence, error if isinstance(error, InvalidRequest) else failed)
    return allowed


def _forbid(allowed: Int[np.ndarray, "W"], tokens: Collection[int]) -> None:
    """Clears the bits of tokens, unless no other may come: what is complete may end."""
    ids = np.fromiter(tokens, np.int64, len(tokens))
    ids = ids[ids < 32 * len(allowed)]
    bits = np.full(len(allowed), -1, np.int32)
    np.bitwise_and.at(bits, ids >> 5, ~np.left_shift(np.uint32(1), ids & 31).astype(np.int32))
    if (allowed & bits).any():
        allowed &= bits


def _unreadable(structure: Structure, why: str) -> InvalidRequest:
    kind = structure.kind.replace("_", " ")
    return InvalidRequest(f"the {kind} {shown(structure.text)} cannot be used: {why}", "structure")
