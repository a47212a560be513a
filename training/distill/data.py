"""Training data of a distillation: texts of files, packed into rows of tokens."""

import codecs
import hashlib
import itertools
import json
import random
import re
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.attention import Paged
from jmoe.config import ModelConfig
from jmoe.digests import sha256_of
from jmoe.extras import need
from jmoe.recurrent import Recurrent
from jmoe.tokenizer import Tokenizer
from training.packing import Batch, Encoded, to_arrays


class Text(NamedTuple):
    """A text of a data file. `prompt` is empty for a plain one; `chat`: a template formatted it."""

    line: int
    prompt: str
    answer: str
    chat: bool = False
    token_ids: tuple[list[int], list[int]] | None = None  # of prompt and answer, in place of both


def read_texts(data: Path, tokenizer: Tokenizer | None = None) -> Iterator[Text]:
    """Yields the texts of a data file: JSON lines (`*.jsonl`), Parquet (`*.parquet`), else a text a
    line.

    A JSON line, or a row of Parquet, has `prompt` and `answer`; or `text`, or `prompt` alone, a
    plain text; or `messages`, a list of `role` and `content` whose last is the assistant's, which
    get the model's chat template, and need `tokenizer`; or `prompt_token_ids` and `token_ids`, as a
    server captures them (`serving.telemetry.capture`). Raises ValueError for a file that is
    missing, empty, not UTF-8, or malformed, and for messages without a chat template, naming the
    line.
    """
    is_empty = True
    for number, row in _parquet_rows(data) if data.suffix == ".parquet" else _lines(data):
        if isinstance(row, str) and not row.strip():
            continue
        is_empty = False
        if isinstance(row, str) and data.suffix != ".jsonl":
            yield Text(number, "", row)
            continue
        try:
            yield _of_row(_from_json(row) if isinstance(row, str) else row, number, tokenizer)
        except _NOT_A_TEXT as error:
            raise ValueError(
                f"{data}, line {number}: expected a JSON object with string `prompt` and optional "
                f"`answer`, with `text`, with `messages`, or with `prompt_token_ids` and "
                f"`token_ids` ({error!r})"
            ) from None
        except ValueError as error:  # what the chat template says
            raise ValueError(f"{data}, line {number}: {error}") from None
    if is_empty:
        raise ValueError(f"data file {data} holds no text")


def _lines(data: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a text file, one at a time, and their numbers."""
    try:
        with data.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = raw.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").decode("utf-8")
                # JSON may hold other line ends, such as U+2028, inside a text.
                for part in [line] if data.suffix == ".jsonl" else line.splitlines():
                    yield number, part
    except OSError as error:
        raise ValueError(f"cannot read data file {data}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"cannot read data file {data}, line {number}: not UTF-8 ({error})"
        ) from None


def _parquet_rows(data: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows of a Parquet file, read some hundreds at a time, and their numbers."""
    need("train", "pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(data) as file:
            columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
            if not columns:
                raise ValueError(
                    f"{data} has the columns {', '.join(file.schema_arrow.names)}; expected "
                    "`prompt` and optional `answer`, `text`, or `messages`"
                )
            batches = file.iter_batches(_ROWS_AT_ONCE, columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield number, {name: value for name, value in row.items() if value is not None}
    except (OSError, ArrowException) as error:
        raise ValueError(f"cannot read data file {data}: {error}") from None


_COLUMNS = ("messages", "prompt", "answer", "text")
_ROWS_AT_ONCE = 256


def _from_json(line: str) -> Any:
    row = json.loads(line)
    if "\\u" in line:  # half a surrogate pair is JSON, and no text
        json.dumps(row, ensure_ascii=False).encode()
    return row


def _of_row(row: Any, number: int, tokenizer: Tokenizer | None) -> Text:
    if "token_ids" in row:
        return Text(
            number, "", "", token_ids=(_ids(row["prompt_token_ids"]), _ids(row["token_ids"]))
        )
    if "messages" in row:
        return _from_messages(row["messages"], number, tokenizer)
    if "text" in row and "prompt" not in row:
        row = {"prompt": row["text"]}
    prompt, answer = row["prompt"], row.get("answer", "")
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise TypeError("not a string")
    return Text(number, prompt, answer) if answer else Text(number, "", prompt)


def _ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or any(
        type(one) is not int or not 0 <= one < 2**31 for one in ids
    ):
        raise TypeError("token ids must be a list of whole numbers from 0")
    return ids


def _from_messages(messages: Any, number: int, tokenizer: Tokenizer | None) -> Text:
    if not isinstance(messages, list) or len(messages) < 2:
        raise TypeError("messages must be a list of at least two")
    if not all(isinstance(message[key], str) for message in messages for key in _MESSAGE):
        raise TypeError("role and content must be strings")
    if messages[-1]["role"] != "assistant":
        raise ValueError("the last of the messages must be the assistant's; it is what is answered")
    if tokenizer is None:
        raise ValueError("messages need a model with a tokenizer and a chat template")
    return Text(number, tokenizer.chat(messages[:-1]), messages[-1]["content"], chat=True)


_MESSAGE = ("role", "content")
_NOT_A_TEXT = (json.JSONDecodeError, KeyError, TypeError, AttributeError, RecursionError)


class Corpus:
    """Packed rows of the texts of data files. Token ids lie in a file, so that texts of any size
    take 24 bytes of memory a piece; rows are made as they are asked for.

    A piece has at most `length` + 1 tokens; pieces fill rows in an order drawn from `seed`, and one
    that does not fit begins the next row. Pieces of files from number `apart` on fill rows of
    their own: `parts` has the numbers of both kinds of rows.
    """

    def __init__(
        self,
        ids: Int[np.ndarray, " T"],
        starts: Int[np.ndarray, " P_and_1"],
        num_prompt: Int[np.ndarray, " P"],
        files: Int[np.ndarray, " P"],
        length: int,
        seed: int,
        apart: int,
    ) -> None:
        """`files` has the number of each piece's data file, which is its family in a `Batch`."""
        self._ids, self._starts, self._num_prompt = ids, starts, num_prompt
        self._files = files
        self.length = length
        order, firsts, ends = array("q"), array("q", [0]), [0]
        split = int(np.searchsorted(files, apart))
        for pieces in (range(split), range(split, len(files))):
            own = array("q", pieces)
            random.Random(f"distill/{seed}").shuffle(own)
            order.extend(own)
        self._order = np.frombuffer(order, np.int64)
        filled = np.concatenate([[0], np.cumsum((np.diff(starts) - 1)[self._order])])
        for end in (split, len(files)):
            while firsts[-1] < end:
                most = filled[firsts[-1]] + length
                full = int(np.searchsorted(filled, most, side="right")) - 1
                firsts.append(min(full, end))
            ends.append(len(firsts) - 1)
        self.parts = [range(*part) for part in itertools.pairwise(ends) if part[0] < part[1]]
        self._firsts = np.frombuffer(firsts, np.int64)
        self._filled = filled[self._firsts]  # tokens in the rows before each row, and in all

    def __len__(self) -> int:
        """Returns the number of packed rows."""
        return len(self._firsts) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted from, of all rows."""
        return int(self._filled[-1])

    def rows(self, own: slice | Int[np.ndarray, " R"]) -> Batch:
        """Returns some of the rows, by their numbers."""
        numbers = np.arange(len(self))[own]
        return to_arrays([self._row(number) for number in numbers], self.length)

    def first(self, num_tokens: int) -> Batch:
        """Returns the first rows, as many as hold `num_tokens` tokens; all where there are fewer.
        Of two parts each gives half of them, or what it has.
        """
        numbers, wanted = [], num_tokens
        least_first = sorted(self.parts, key=lambda part: self._tokens_before(part.stop, part))
        for at, part in enumerate(least_first):
            own = self._filled[part.start] + -(-wanted // (len(self.parts) - at))
            last = min(int(np.searchsorted(self._filled[1:], own)) + 1, part.stop)
            numbers += range(part.start, last)
            wanted = max(0, wanted - self._tokens_before(last, part))
        return self.rows(np.sort(numbers))

    def _tokens_before(self, row: int, part: range) -> int:
        return int(self._filled[row] - self._filled[part.start])

    def _row(self, number: int) -> list[Encoded]:
        pieces = self._order[self._firsts[number] : self._firsts[number + 1]]
        return [
            Encoded(
                self._ids[self._starts[piece] : self._starts[piece + 1]],
                int(self._num_prompt[piece]),
                str(self._files[piece]),
            )
            for piece in pieces
        ]


def check_trains(cfg: ModelConfig, length: int) -> None:
    """Raises ValueError for a model whose layers cannot be trained, or not over such rows."""
    if length > cfg.max_position:
        raise ValueError(f"length is {length}; the model has {cfg.max_position} positions")
    if others := [kind for kind in cfg.attention_kinds if not isinstance(kind, Paged | Recurrent)]:
        raise ValueError(f"layers attend by {others[0]}, and training by jmoe's own kinds")


def pack_files(
    files: Sequence[Path],
    cfg: ModelConfig,
    tokenizer: Tokenizer | None,
    length: int,
    seed: int,
    folder: Path | None = None,
    more: Callable[[], Sequence[Path]] = tuple,
) -> Corpus:
    """Returns all texts of `files` in packed rows, in an order drawn from `seed`, and those of the
    files of `more`, which is called once these are read, in rows of their own.

    Their token ids, four bytes each, go to a file in `folder` (None: the system's for temporary
    ones) that goes when the corpus does. Raises ValueError for unreadable data, a model without
    tokenizer, and a tokenizer with ids that the model has no embedding for, naming the line; and
    where the disk is full.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer.json; its inputs cannot be made from text")
    check_trains(cfg, length)
    if not files:
        raise ValueError("no data file was given; name at least one with --data")
    starts, num_prompt, of_file = array("q", [0]), array("i"), array("i")
    with tempfile.TemporaryFile(dir=folder) as kept:
        for number, file in enumerate(_one_after_another(files, more)):
            for line, prompt, ids in _tokens(read_texts(file, tokenizer), tokenizer):
                if not np.isin(ids[-1:], cfg.eos_token_ids).any():
                    ids = np.concatenate([ids, np.array(cfg.eos_token_ids[:1], np.int32)])
                if (highest := int(ids.max(initial=0))) >= cfg.vocab_size:
                    raise ValueError(
                        f"{file}, line {line}: has token {highest}, but the model has "
                        f"{cfg.vocab_size}: the tokenizer, or the token ids, are another model's"
                    )
                for at in range(0, max(1, len(ids) - 1), length):
                    piece = ids[at : at + length + 1]
                    if len(piece) > 1:
                        _keep(kept, piece)
                        starts.append(starts[-1] + len(piece))
                        num_prompt.append(max(1, prompt - at))
                        of_file.append(number)
        if not num_prompt:
            raise ValueError(f"no text of {', '.join(map(str, files))} has two tokens or more")
        kept.flush()
        all_ids = np.memmap(kept, np.int32, "r")
    pieces = np.array(starts), np.array(num_prompt), np.array(of_file)
    return Corpus(all_ids, *pieces, length, seed, len(files))


def _one_after_another(files: Sequence[Path], more: Callable[[], Sequence[Path]]) -> Iterator[Path]:
    yield from files
    yield from more()


def _keep(kept: IO[bytes], ids: Int[np.ndarray, " T"]) -> None:
    try:
        kept.write(ids.astype(np.int32).tobytes())
    except OSError as error:
        raise ValueError(
            f"cannot keep the tokens of the data ({error}): free some space where --out is"
        ) from error


def _tokens(
    texts: Iterable[Text], tokenizer: Tokenizer
) -> Iterator[tuple[int, int, Int[np.ndarray, " T"]]]:
    """Yields the line, the number of the prompt's tokens, and the tokens of each text."""
    for some in _together(texts):
        # A template writes its own special tokens, and none belongs between prompt and answer.
        asked = [(text.prompt, not text.chat) for text in some]
        asked += [(text.answer, not text.prompt) for text in some]
        ids = encode_all(tokenizer, asked)
        for text, prompt, answer in zip(some, ids[: len(some)], ids[len(some) :], strict=True):
            if text.token_ids is not None:
                prompt, answer = (np.array(part, np.int32) for part in text.token_ids)
            elif not text.prompt:
                prompt = prompt[:0]
            yield text.line, len(prompt), np.concatenate([prompt, answer])


def _together(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Yields texts in lists of about `_PART` characters."""
    some: list[Text] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text.prompt) + len(text.answer) + sum(map(len, text.token_ids or ()))
        if size >= _PART:
            yield some
            some, size = [], 0
    if some:
        yield some


def encode_all(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]]
) -> list[Int[np.ndarray, " T"]]:
    """Returns the token ids of each text as `encode` does, with special tokens where it says so;
    the short ones are encoded together, on all processors.
    """
    found: list[Int[np.ndarray, " T"] | None] = [None] * len(texts)
    for special in (False, True):
        own = [
            at for at, (text, wants) in enumerate(texts) if wants == special and len(text) <= _PART
        ]
        parts = [texts[at][0] for at in own]
        made = tokenizer.backend.encode_batch_fast(parts, add_special_tokens=special)
        for at, encoded in zip(own, made, strict=True):
            found[at] = np.array(encoded.ids, np.int32)
    return [
        encode(tokenizer, text, special_tokens=special) if ids is None else ids
        for ids, (text, special) in zip(found, texts, strict=True)
    ]


def encode(
    tokenizer: Tokenizer, text: str, *, special_tokens: bool = True
) -> Int[np.ndarray, " T"]:
    """Returns the token ids of `text` as `Tokenizer.encode` gives them; a long text is encoded in
    parts.

    Encoding takes 150 to 700 bytes of memory a character. A part has 65,536 characters or a few
    more. It ends before a space that follows a character other than white space, where the text
    around, 256 characters on either side, has the same tokens in one call as in two. There each
    word split of a served model's pre-tokenizer ends anyway (its patterns have white space only
    before a word, look no further than the next character, and never behind), and two tokens of
    BPE that may be neighbours may be so in every text. A text in which 16 such spaces in succession
    disagree, or that has none, is encoded on from there in one call.
    """
    if len(text) <= _PART:
        return np.array(tokenizer.encode(text, special_tokens=special_tokens), np.int32)

    def plain(part: str) -> list[int]:
        return tokenizer.encode(part, special_tokens=False)

    ids = [np.array(plain(part), np.int32) for part in _parts(plain, text)]
    if special_tokens:  # what the tokenizer adds before and after any text
        one = tokenizer.backend.encode("a")
        own = [at for at, added in enumerate(one.special_tokens_mask) if not added]
        ids = [one.ids[: own[0]], *ids, one.ids[own[-1] + 1 :]]
    return np.concatenate([np.asarray(part, np.int32) for part in ids])


def _parts(plain: Callable[[str], list[int]], text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PART:
        spaces = (space.start() for space in _SPACE.finditer(text, start + _PART))
        for cut in itertools.islice(spaces, _TRIES):
            before, after = text[max(start, cut - _AROUND) : cut], text[cut : cut + _AROUND]
            if plain(before + after) == plain(before) + plain(after):
                break
        else:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


_PART, _AROUND, _TRIES = 1 << 16, 256, 16
_SPACE = re.compile(r"(?<=\S) ")


def digest(files: Sequence[Path]) -> str:
    """Returns a hash of the files' contents, in order."""
    return hashlib.sha256(b"".join(bytes.fromhex(sha256_of(path)) for path in files)).hexdigest()
