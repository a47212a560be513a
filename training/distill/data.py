"""Training data of a distillation: texts of files, packed into rows of tokens."""

import codecs
import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jmoe.attention import Paged
from jmoe.config import ModelConfig
from jmoe.tokenizer import Tokenizer
from training.packing import Batch, Encoded, to_arrays


class Text(NamedTuple):
    """A text of a data file. `prompt` is empty for a plain one; `chat`: a template formatted it."""

    line: int
    prompt: str
    answer: str
    chat: bool = False


def read_texts(data: Path, tokenizer: Tokenizer | None = None) -> list[Text]:
    """Reads the texts of a data file: JSON lines (`*.jsonl`), else a text a line.

    A JSON line has `prompt` and `answer`, or `prompt` alone, a plain text; or `messages`, a list of
    `role` and `content` whose last is the assistant's. Those get the model's chat template, and
    need `tokenizer`. Raises ValueError for a file that is missing, empty, not UTF-8, or malformed,
    and for messages without a chat template, naming the line.
    """
    texts = []
    json_lines = data.suffix == ".jsonl"
    content = _content(data)
    # JSON may hold other line ends, such as U+2028, inside a text.
    for number, line in enumerate(content.split("\n") if json_lines else content.splitlines(), 1):
        if not line.strip():
            continue
        if not json_lines:
            texts.append(Text(number, "", line))
            continue
        try:
            texts.append(_from_json(line, number, tokenizer))
        except _NOT_A_TEXT as error:
            raise ValueError(
                f"{data}, line {number}: expected a JSON object with string `prompt` and optional "
                f"`answer`, or with `messages` ({error!r})"
            ) from None
        except ValueError as error:  # what the chat template says
            raise ValueError(f"{data}, line {number}: {error}") from None
    if not texts:
        raise ValueError(f"data file {data} holds no text")
    return texts


def _content(data: Path) -> str:
    try:
        raw = data.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read data file {data}: {error}") from None
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"cannot read data file {data}, line {line}: not UTF-8 ({error})"
        ) from None


def _from_json(line: str, number: int, tokenizer: Tokenizer | None) -> Text:
    row = json.loads(line)
    if "\\u" in line:  # half a surrogate pair is JSON, and no text
        json.dumps(row, ensure_ascii=False).encode()
    if "messages" in row:
        return _from_messages(row["messages"], number, tokenizer)
    prompt, answer = row["prompt"], row.get("answer", "")
    if not (isinstance(prompt, str) and isinstance(answer, str)):
        raise TypeError("not a string")
    return Text(number, prompt, answer) if answer else Text(number, "", prompt)


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


def pack_files(
    files: Sequence[Path], cfg: ModelConfig, tokenizer: Tokenizer | None, length: int, seed: int
) -> Batch:
    """Returns all texts of `files` in packed rows, in an order drawn from `seed`.

    Raises ValueError for unreadable data, a model without tokenizer, and a tokenizer with ids that
    the model has no embedding for, naming the line.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer.json; its inputs cannot be made from text")
    if length > cfg.max_position:
        raise ValueError(f"length is {length}; the model has {cfg.max_position} positions")
    if others := [kind for kind in cfg.attention_kinds if not isinstance(kind, Paged)]:
        raise ValueError(f"layers attend by {others[0]}, and training in full and over windows")
    if not files:
        raise ValueError("no data file was given; name at least one with --data")
    items: list[Encoded] = []
    for file in files:
        for text in read_texts(file, tokenizer):
            pieces = _pieces(cfg, tokenizer, text, length)
            highest = max((int(np.max(piece.ids)) for piece in pieces), default=0)
            if highest >= cfg.vocab_size:
                raise ValueError(
                    f"{file}, line {text.line}: the tokenizer makes token {highest}, but the model "
                    f"has {cfg.vocab_size}: it is another model's tokenizer"
                )
            items += pieces
    if not items:
        raise ValueError(f"no text of {', '.join(map(str, files))} has two tokens or more")
    random.Random(f"distill/{seed}").shuffle(items)
    return to_arrays(_fill(items, length), length)


def _pieces(cfg: ModelConfig, tokenizer: Tokenizer, text: Text, length: int) -> list[Encoded]:
    # A template writes its own special tokens, and none belongs between prompt and answer.
    prompt = encode(tokenizer, text.prompt, special_tokens=not text.chat)
    if not text.prompt:
        prompt = prompt[:0]
    answer = encode(tokenizer, text.answer, special_tokens=not text.prompt)
    ids = np.concatenate([prompt, answer, np.array(cfg.eos_token_ids[:1], np.int32)])
    cuts = range(0, max(1, len(ids) - 1), length)
    pieces = [(ids[at : at + length + 1], len(prompt) - at) for at in cuts]
    return [Encoded(piece, max(1, own), "") for piece, own in pieces if len(piece) > 1]


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
    disagree, or that has none, is encoded on from there in one call, as is every text of a
    tokenizer that truncates or pads.
    """
    if len(text) <= _PART or tokenizer.backend.truncation or tokenizer.backend.padding:
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


def _fill(items: list[Encoded], length: int) -> list[list[Encoded]]:
    """Returns rows filled one after another: an item that does not fit begins the next."""
    rows: list[list[Encoded]] = [[]]
    room = length
    for item in items:
        need = len(item.ids) - 1
        if need > room:
            rows.append([])
            room = length
        rows[-1].append(item)
        room -= need
    return rows


def digest(files: Sequence[Path]) -> str:
    """Returns a hash of the files' contents, in order."""
    out = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            out.update(hashlib.file_digest(file, "sha256").digest())
    return out.hexdigest()
