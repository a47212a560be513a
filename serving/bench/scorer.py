"""Log-likelihoods and generations from a running server, many requests at a time.

Needs `grpcio` and the generated stubs alone: no jax, and no tokenizer, as the server counts tokens.
Runs on Python 3.10, so that evaluation tools can use it in environments of their own.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from serving.client import admin_address_of
from serving.client.connection import Connection
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

log = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")
Progress = Callable[[], None]
"""Called once for each request that is done."""

_CONNECT_S = 30.0
_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


class PromptTooLong(ValueError):
    """The server has no room for a prompt and what it is asked to generate."""


@dataclass(frozen=True)
class Reply:
    """All messages of one request joined."""

    text: str
    prompt_tokens: int
    prompt_logprobs: tuple[float, ...]  # of every prompt token but the first


class Scorer:
    """Log-likelihoods and generations from one server, over several requests at a time."""

    def __init__(
        self,
        address: str,
        *,
        admin_address: str | None = None,
        prefix: str = "",
        allow_brownout: bool = True,
        concurrency: int = 0,
        timeout_s: float = 600.0,
        connection: Connection | None = None,
    ) -> None:
        """Connects, and asks for the server's limits.

        Args:
            address: `host:port`.
            admin_address: of its admin service; None: where the server says it is.
            prefix: stands before a text that has no context, such as the end-of-text token's own
                text; the server's tokenizer must read it as tokens.
            allow_brownout: False: requests are exempt, whatever the server's setting.
            concurrency: requests at a time; 0: as many as the server decodes together.
            timeout_s: for one request, its retries included.
            connection: key and certificates; None: those of the environment.

        Raises ConnectionError where no server answers.
        """
        self.prefix, self.allow_brownout, self.timeout_s = prefix, allow_brownout, timeout_s
        connection = connection or Connection.of_environment()
        self._channel, self._metadata = connection.channel(address), connection.metadata
        self._generate = rpc.GenerationStub(self._channel).Generate
        try:
            info = rpc.GenerationStub(self._channel).GetServerInfo(
                pb.GetServerInfoRequest(),
                timeout=_CONNECT_S,
                wait_for_ready=True,
                metadata=self._metadata,
            )
            address = admin_address or admin_address_of(address, info)
            with connection.channel(address) as admin:
                self.brownout = rpc.AdminStub(admin).GetBrownout(
                    pb.GetBrownoutRequest(), timeout=_CONNECT_S, metadata=self._metadata
                )
        except grpc.RpcError as error:
            raise ConnectionError(
                f"no jmoe server answers at {address} ({_code(error).name}); start one with "
                "`jmoe serve`"
            ) from None
        self.model, self.max_model_len = info.model, info.max_model_len
        self._pool = ThreadPoolExecutor(concurrency or max(1, info.max_num_seqs))
        self.expert_visits = self.degraded_visits = 0
        self._warned: set[str] = set()

    def close(self) -> None:
        """Ends the connection."""
        self._pool.shutdown(cancel_futures=True)
        self._channel.close()

    # -- what an evaluation asks for -------------------------------------------------------------

    def loglikelihood(
        self, pairs: Sequence[tuple[str, str]], progress: Progress | None = None
    ) -> list[tuple[float, bool]]:
        """Returns, for each (context, continuation), the continuation's log-probability and whether
        it is greedy.

        A context too long for the server loses its beginning. Spaces that end a context count to
        the continuation, as tokenizers join them. `is_greedy` compares texts: the continuation
        and as many greedy tokens as it has.
        """
        split = [self._split(context, continuation) for context, continuation in pairs]
        scored = self._map(self._score, split, progress)
        contexts = sorted({context for context, _ in scored})
        first = dict(
            zip(
                contexts, self._map(lambda c: self._ask(c, max_new_tokens=1), contexts), strict=True
            )
        )
        # (context, tokens of the continuation) of each pair; greedy decoding is asked for only
        # where its first token agrees.
        counts = [
            max(0, len(logprobs) + 1 - first[context].prompt_tokens) for context, logprobs in scored
        ]
        wanted = {
            (context, count)
            for (context, _), (_, text), count in zip(scored, split, counts, strict=True)
            if count and _begins(text, first[context].text)
        }
        asked = sorted(wanted)
        greedy = dict(zip(asked, self._map(self._greedy, asked), strict=True))
        found = []
        for (context, logprobs), (_, text), count in zip(scored, split, counts, strict=True):
            total = math.fsum(logprobs[len(logprobs) - count :])
            agreed = not count or _same(greedy.get((context, count)), text)
            found.append((total, agreed))
        return found

    def loglikelihood_rolling(
        self, texts: Sequence[str], progress: Progress | None = None
    ) -> list[float]:
        """Returns the log-probability of whole texts, each after the prefix.

        A text too long for the server is cut at white space into pieces that fit, each after the
        prefix: without a tokenizer, windows cannot overlap token by token.
        """
        return self._map(self._rolling, texts, progress)

    def generate_until(
        self, requests: Sequence[tuple[str, Mapping[str, Any]]], progress: Progress | None = None
    ) -> list[str]:
        """Returns continuations of (context, fields of `SamplingParams`), `max_new_tokens` among
        them.

        Where a prompt leaves less room than `max_new_tokens`, fewer are generated.
        """
        return self._map(lambda args: self._until(*args), requests, progress)

    # -- one request -----------------------------------------------------------------------------

    def _split(self, context: str, continuation: str) -> tuple[str, str]:
        """Returns the context, never empty, and the continuation, which gets the white space
        between them.
        """
        bare = context.rstrip()
        return self._context(bare), context[len(bare) :] + continuation

    def _context(self, text: str) -> str:
        if not text and not self.prefix:
            raise ValueError(
                "a text without context needs a token before it; give the model's end-of-text "
                "token, as --model_args address=...,prefix=<|endoftext|>"
            )
        return text or self.prefix

    def _score(self, pair: tuple[str, str]) -> tuple[str, tuple[float, ...]]:
        """Returns the context that was used, and log-probabilities of context and continuation."""
        context, continuation = pair
        while True:
            try:
                reply = self._ask(context + continuation, max_new_tokens=1, prompt_logprobs=True)
                return context, reply.prompt_logprobs
            except PromptTooLong:
                context = self._shorter(context)

    def _greedy(self, wanted: tuple[str, int]) -> str | None:
        context, count = wanted
        try:
            return self._ask(context, max_new_tokens=count, ignore_eos=True).text
        except PromptTooLong:  # a continuation that fills the last position of all
            return None

    def _rolling(self, text: str) -> float:
        prefix = self._context("")
        pieces, total = [text], 0.0
        while pieces and (piece := pieces.pop()):
            try:
                reply = self._ask(prefix + piece, max_new_tokens=1, prompt_logprobs=True)
            except PromptTooLong:
                self._warn("a text is longer than the server's context and is scored in pieces")
                pieces += reversed(halves(piece))
                continue
            before = self._ask(prefix, max_new_tokens=1).prompt_tokens
            total += math.fsum(reply.prompt_logprobs[before - 1 :])
        return total

    def _until(self, context: str, sampling: Mapping[str, Any]) -> str:
        context = self._context(context)
        while True:
            try:
                return self._ask(context, **sampling).text
            except PromptTooLong:
                pass
            try:
                room = self.max_model_len - self._ask(context, max_new_tokens=1).prompt_tokens
            except PromptTooLong:
                context = self._shorter(context)
                continue
            self._warn(
                f"{sampling['max_new_tokens']} new tokens do not fit and are cut to what does"
            )
            sampling = {**sampling, "max_new_tokens": room}

    def _shorter(self, context: str) -> str:
        """Returns a context without its first eighth. Raises PromptTooLong where nothing is left to
        cut.
        """
        self._warn("a context is longer than the server's and loses its beginning")
        cut = context[max(1, len(context) // 8) :]
        if not cut:
            raise PromptTooLong(f"a continuation alone is longer than {self.max_model_len} tokens")
        return cut

    def _ask(self, text: str, **sampling: Any) -> Reply:
        """Sends one prompt until it is answered. Raises PromptTooLong, and RpcError otherwise."""
        request = pb.GenerateRequest(
            text=text, sampling=pb.SamplingParams(**sampling), allow_brownout=self.allow_brownout
        )
        ends_at, busy = time.monotonic() + self.timeout_s, None
        while True:
            try:
                left_s = ends_at - time.monotonic()
                messages = list(self._generate(request, timeout=left_s, metadata=self._metadata))
                break
            except grpc.RpcError as error:
                # A token is a byte or more: a prompt of fewer bytes fits, and the fault is another.
                new = sampling["max_new_tokens"]
                fits = len(text.encode()) + new <= self.max_model_len
                if _code(error) == grpc.StatusCode.INVALID_ARGUMENT and not fits:
                    raise PromptTooLong(str(error)) from None
                if busy and _code(error) == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise busy from error  # why there was too little time
                wait_s = _pushback_s(error)
                if _code(error) not in _BUSY or time.monotonic() + wait_s >= ends_at:
                    raise
                busy = error
                time.sleep(wait_s)
        usage = messages[-1].usage
        self.expert_visits += usage.expert_visits
        self.degraded_visits += usage.degraded_visits
        return Reply(
            "".join(message.text for message in messages),
            usage.prompt_tokens,
            tuple(p for message in messages for p in message.prompt_logprobs),
        )

    def _map(
        self, work: Callable[[A], B], items: Iterable[A], progress: Progress | None = None
    ) -> list[B]:
        """Runs `work` on every item, several at a time; returns the results in order."""

        def one(item: A) -> B:
            result = work(item)
            if progress is not None:
                progress()
            return result

        return list(self._pool.map(one, items))

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)


def _code(error: Any) -> grpc.StatusCode:
    return error.code()


def _pushback_s(error: Any) -> float:
    """Returns how many seconds a busy server asks to wait."""
    trailing = dict(error.trailing_metadata() or ())
    return float(trailing.get("grpc-retry-pushback-ms", 1000)) / 1000


def _same(text: str | None, continuation: str) -> bool:
    """Returns whether texts are equal but for the space that some tokenizers drop at the
    beginning.
    """
    return text is not None and continuation in (text, f" {text}")


def _begins(continuation: str, text: str) -> bool:
    """Returns whether a continuation may begin with a greedy token's text (empty: half a
    character).
    """
    return continuation.startswith(text) or continuation.startswith(f" {text}")


def halves(text: str) -> tuple[str, str]:
    """Splits a text before the white space nearest to its middle, or in the middle.

    Raises PromptTooLong for a single character.
    """
    if len(text) < 2:
        raise PromptTooLong("the prefix alone fills the server's context")
    middle = len(text) // 2
    spaces = [i for i in range(1, len(text)) if text[i].isspace() and not text[i - 1].isspace()]
    at = min(spaces, key=lambda i: abs(i - middle), default=middle)
    return text[:at], text[at:]
