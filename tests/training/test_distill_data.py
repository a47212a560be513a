"""Texts of data files: conversations through the chat template, and errors that name the line."""

import dataclasses
import json
import random
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jmoe.config import read_config
from jmoe.tokenizer import Tokenizer
from training.distill import DistillConfig, data
from training.distill.data import pack_files, read_texts
from training.distill.fit import HELD_OUT
from training.distill.refine import _rows

TALK = [
    {"role": "user", "content": "copy ab"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "copy \u2028 cd"},
    {"role": "assistant", "content": "cd"},
]


def written(path, *rows):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    return path


def test_messages_get_the_chat_template(tiny_dir, tmp_path):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    path = written(tmp_path / "talk.jsonl", {"messages": TALK}, {"prompt": "a", "answer": "b"})
    talk, plain = read_texts(path, tokenizer)
    assert talk.prompt == tokenizer.chat(TALK[:-1])
    assert talk.prompt.startswith("<|im_start|>copy ab<|im_end|>ab")
    assert (talk.line, talk.answer, talk.chat) == (1, "cd", True)
    assert plain[:3] == (2, "a", "b")
    own = written(tmp_path / "one.jsonl", {"messages": TALK})
    batch = pack_files([own], cfg, tokenizer, 128, 0).rows(slice(None))
    ids = [*tokenizer.encode(talk.prompt), *tokenizer.encode("cd"), *cfg.eos_token_ids[:1]]
    row = batch.items[0] > 0
    assert batch.tokens[0][row].tolist() == ids[:-1]
    answer = batch.targets[0][batch.answer[0] > 0]
    assert tokenizer.decode(answer.tolist()) == "cd"
    assert np.count_nonzero(batch.answer) == len(ids) - len(tokenizer.encode(talk.prompt))


def test_no_special_token_between_prompt_and_answer(tiny_dir, tmp_path):
    """As of a tokenizer that begins every text with one."""
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    start = "<|im_start|>"
    number = tokenizer.backend.token_to_id(start)
    tokenizer.backend.post_processor = TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, number)]
    )
    for rows, starts in [
        ([{"prompt": "ab", "answer": "cd"}], 1),
        ([{"prompt": "ab"}], 1),
        ([{"messages": TALK}], 2),  # the template's own, one a user's turn
    ]:
        path = written(tmp_path / "data.jsonl", *rows)
        batch = pack_files([path], cfg, tokenizer, 128, 0).rows(slice(None))
        assert np.count_nonzero(batch.tokens == number) == starts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK[:3]}, "line 2: the last of the messages must be the assistant's"),
        ({"messages": TALK[1:2]}, "line 2: expected a JSON object.*at least two"),
        ({"messages": [{"role": "user"}, TALK[1]]}, "line 2: expected a JSON object.*content"),
        ({"messages": "hello"}, "line 2: expected a JSON object"),
        ({"token_ids": [1]}, "line 2: expected a JSON object.*prompt_token_ids"),
        ({"prompt_token_ids": [1], "token_ids": [-1]}, "line 2: .*whole numbers from 0"),
        ({"prompt_token_ids": [1], "token_ids": [2**31]}, "line 2: .*whole numbers from 0"),
        ({"prompt_token_ids": [1.5], "token_ids": []}, "line 2: .*whole numbers from 0"),
        (["a"], "line 2: expected a JSON object"),
        (5, "line 2: expected a JSON object"),
    ],
)
def test_bad_lines_are_named(tiny_dir, tmp_path, row, message):
    path = written(tmp_path / "bad.jsonl", {"prompt": "a"}, row)
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        list(read_texts(path, Tokenizer.load(tiny_dir.path)))


def test_messages_without_a_chat_template_are_refused(tiny_dir, tmp_path):
    path = written(tmp_path / "talk.jsonl", {"messages": TALK})
    with pytest.raises(ValueError, match=r"talk.jsonl, line 1: messages need"):
        list(read_texts(path))
    shutil.copy(tiny_dir.path / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match=r"talk.jsonl, line 1: .*no chat template"):
        list(read_texts(path, Tokenizer.load(tmp_path)))


def test_a_byte_order_mark_is_no_text_and_half_a_surrogate_pair_is_refused(tmp_path):
    for name, content in (("a.txt", "one"), ("a.jsonl", '{"prompt": "one"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert next(read_texts(tmp_path / name)).answer == "one"
    path = tmp_path / "b.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert next(read_texts(path)).answer == "\U0001f600"
    path.write_text('{"prompt": "a"}\n{"prompt": "\\ud83d"}\n')
    with pytest.raises(ValueError, match=r"b.jsonl, line 2: .*surrogates not allowed"):
        list(read_texts(path))


def test_bytes_that_are_not_utf8_are_named_by_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(ValueError, match=r"a.txt, line 3: not UTF-8"):
        list(read_texts(tmp_path / "a.txt"))


def test_a_token_that_the_model_lacks_is_named_by_line(tiny_dir, tmp_path):
    tokenizer = Tokenizer.load(tiny_dir.path)
    most = max(tokenizer.encode("zq 7"))
    cfg = dataclasses.replace(read_config(tiny_dir.path), vocab_size=most, eos_token_ids=(0,))
    path = tmp_path / "a.txt"
    path.write_text("zq 7\n")
    with pytest.raises(ValueError, match=r"a.txt, line 1: has token .*another model's"):
        pack_files([path], cfg, tokenizer, 64, 0)


def test_captured_token_ids_are_those_of_the_text_and_end_once(tiny_dir, tmp_path):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    end = cfg.eos_token_ids[0]
    prompt, answer = (tokenizer.encode(text, special_tokens=False) for text in ("ab", "cd"))
    found = [
        pack_files([written(tmp_path / "a.jsonl", row)], cfg, tokenizer, 128, 0).rows(slice(None))
        for row in (
            {"prompt": "ab", "answer": "cd"},
            {"prompt_token_ids": prompt, "token_ids": answer},
            {"prompt_token_ids": prompt, "token_ids": [*answer, end]},
        )
    ]
    for one in found[1:]:
        np.testing.assert_equal(vars(one), vars(found[0]))


def test_texts_of_one_token_are_no_data(tiny_dir, tmp_path):
    cfg = dataclasses.replace(read_config(tiny_dir.path), eos_token_ids=())
    path = tmp_path / "a.txt"
    path.write_text("a\n")
    with pytest.raises(ValueError, match=r"a.txt has two tokens or more"):
        pack_files([path], cfg, Tokenizer.load(tiny_dir.path), 64, 0)


SPLITS = {
    "bundled": None,
    "gpt2": r"'s| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "none": "",
    "prefixed": None,
    "stripped": None,
}


def tokenizer_of(directory, name):
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    backend, pattern = tokenizer.backend, SPLITS[name]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=name == "prefixed", use_regex=False)
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif name != "bundled":
        backend.pre_tokenizer = byte_level
    if name == "stripped":
        backend.normalizer = normalizers.Strip()
        backend.add_special_tokens([AddedToken("<s>", rstrip=True, lstrip=True)])
    first, last = backend.token_to_id("<|im_start|>"), backend.token_to_id("<|im_end|>")
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", first), ("<|im_end|>", last)],
    )
    return tokenizer


TEXTS = st.lists(
    st.sampled_from(
        ["a", "the", "copy", "12", "3456", "'s", ".", "!?", " ", "  ", "\n", "\t", "<s>"]
    )
    | st.text(max_size=3),
    max_size=60,
).map("".join)


@pytest.mark.parametrize("name", SPLITS)
def test_the_tokens_of_parts_are_those_of_the_whole(tiny_dir, monkeypatch, name):
    monkeypatch.setattr(data, "_PART", 20)
    monkeypatch.setattr(data, "_AROUND", 24)
    tokenizer = tokenizer_of(tiny_dir.path, name)

    @settings(max_examples=80, derandomize=True)
    @given(TEXTS, st.booleans())
    def same(text, special):
        whole = tokenizer.encode(text, special_tokens=special)
        assert data.encode(tokenizer, text, special_tokens=special).tolist() == whole

    same()


@pytest.mark.parametrize("form", ["plain", "prompt", "answer", "messages"])
def test_a_long_line_is_encoded_in_parts(tiny_dir, tmp_path, monkeypatch, form):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    text = "copy ab, 47 + 38. " * 8_000
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    rows = {
        "prompt": {"prompt": text},
        "answer": {"prompt": text, "answer": text},
        "messages": {"messages": talk},
    }
    path = tmp_path / "a.txt"
    if form == "plain":
        path.write_text(text)
    else:
        path = written(tmp_path / "a.jsonl", rows[form])
    longest, own = [], Tokenizer.encode

    def watched(self, text, **options):
        longest.append(len(text))
        return own(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    batch = pack_files([path], cfg, tokenizer, 128, 0).rows(slice(None))
    assert max(longest) < 66_000
    monkeypatch.setattr(data, "_PART", 10**9)
    whole = pack_files([path], cfg, tokenizer, 128, 0).rows(slice(None))
    for part, same in zip(batch.arrays(), whole.arrays(), strict=True):
        np.testing.assert_array_equal(part, same)


# -- a corpus of any size --------------------------------------------------------------------------


def packed_by_hand(path, tokenizer, cfg, length, seed):
    """Returns the rows of packed pieces, each (ids, tokens of the prompt), as they were specified:
    all pieces in memory, shuffled, and filled into rows one after another.
    """
    pieces = []
    for text in read_texts(path, tokenizer):
        prompt = tokenizer.encode(text.prompt, special_tokens=not text.chat) if text.prompt else []
        answer = tokenizer.encode(text.answer, special_tokens=not text.prompt)
        ids = [*prompt, *answer, *cfg.eos_token_ids[:1]]
        cuts = range(0, max(1, len(ids) - 1), length)
        pieces += [(ids[at : at + length + 1], max(1, len(prompt) - at)) for at in cuts]
    pieces = [one for one in pieces if len(one[0]) > 1]
    random.Random(f"distill/{seed}").shuffle(pieces)
    rows, room = [[]], length
    for ids, own in pieces:
        if len(ids) - 1 > room:
            rows.append([])
            room = length
        rows[-1].append((ids, own))
        room -= len(ids) - 1
    return rows


@pytest.mark.parametrize(("length", "seed"), [(64, 0), (7, 3)])
def test_rows_are_those_of_all_texts_shuffled_and_filled(tiny_dir, tmp_path, length, seed):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    texts = [{"prompt": "copy " + "ab " * n, "answer": "cd" * (n % 5)} for n in range(60)]
    path = written(tmp_path / "a.jsonl", *texts, {"messages": TALK}, {"text": "plain " * 40})
    corpus = pack_files([path], cfg, tokenizer, length, seed)
    by_hand = packed_by_hand(path, tokenizer, cfg, length, seed)
    assert len(corpus) == len(by_hand)
    assert corpus.num_tokens == sum(len(ids) - 1 for row in by_hand for ids, _ in row)
    order = np.random.default_rng(0).permutation(len(corpus))
    batch = corpus.rows(order)
    for at, number in enumerate(order):
        own = [(ids, max(0, len(ids) - prompt)) for ids, prompt in by_hand[number]]
        tokens = [token for ids, _ in own for token in ids[:-1]]
        assert batch.tokens[at][batch.items[at] > 0].tolist() == tokens
        assert batch.targets[at][: len(tokens)].tolist() == [t for ids, _ in own for t in ids[1:]]
        assert batch.answer[at].sum() == sum(answers for _, answers in own)
    first = corpus.first(100)
    held = [sum(len(ids) - 1 for ids, _ in row) for row in by_hand]
    assert len(first) == next(n for n in range(1, 99) if sum(held[:n]) >= 100)
    np.testing.assert_array_equal(first.tokens, corpus.rows(slice(0, len(first))).tokens)


@pytest.mark.parametrize("seed", range(3))
def test_files_apart_fill_rows_of_their_own_and_half_of_what_is_drawn(tiny_dir, tmp_path, seed):
    """However large the others are."""
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    files = [tmp_path / name for name in ("many.jsonl", "more.txt", "few.jsonl")]
    for path, count in zip(files, (900, 300, 60), strict=True):
        words = [{"prompt": "copy " + "ab " * (n % 7), "answer": "cd"} for n in range(count)]
        written(path, *words)
    corpus = pack_files(files[:2], cfg, tokenizer, 64, seed, more=lambda: files[2:])
    many, few = corpus.parts
    assert (many.start, many.stop, few.stop) == (0, few.start, len(corpus))
    whole = corpus.rows(slice(None))
    kinds = [set(of_row) for of_row in whole.families]
    assert all("2" not in own for own in kinds[: many.stop])
    assert all(own == {"2"} for own in kinds[few.start :])
    alone = pack_files(files[:2], cfg, tokenizer, 64, seed)
    np.testing.assert_array_equal(whole.tokens[: many.stop], alone.rows(slice(None)).tokens)
    config = DistillConfig(refine_rows=9, seed=seed)
    for step in (0, 1, HELD_OUT):
        drawn = _rows(corpus, step, config).families
        assert [set(of_row) == {"2"} for of_row in drawn] == [False] * 5 + [True] * 4
    for wanted in (200, 10**6):
        first = corpus.first(wanted)
        own = [np.count_nonzero(first.items[at]) for at, f in enumerate(first.families) if "2" in f]
        held = sum(np.count_nonzero(whole.items[row]) for row in few)
        assert min(held, wanted / 2) <= sum(own) < min(held, wanted / 2) + 64
        assert np.count_nonzero(first.items) >= min(wanted, corpus.num_tokens)


@pytest.mark.deep
def test_a_corpus_is_never_in_memory(tiny_dir, tmp_path):
    tokenizer, cfg = Tokenizer.load(tiny_dir.path), read_config(tiny_dir.path)
    path = tmp_path / "a.txt"
    line = "once upon a time there was a quiet fox who lived near the river. " * 30 + "\n"
    with path.open("w") as file:
        file.writelines(line for _ in range(2_000))
    tracemalloc.start()
    try:
        corpus = pack_files([path], cfg, tokenizer, 128, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert corpus.num_tokens > 700_000
    assert peak < path.stat().st_size / 2 < 4 * corpus.num_tokens


PARQUET = {
    "talk": [{"messages": TALK}, {"messages": TALK[2:]}],
    "answered": [{"prompt": "a b", "answer": "c"}, {"prompt": "d", "answer": None}],
    "plain": [{"text": "one two"}, {"text": "three"}],
}


@pytest.mark.parametrize("kind", PARQUET)
def test_parquet_is_read_as_json_lines_are(tiny_dir, tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = PARQUET[kind] * 300  # more than are read at once
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    without = ({k: v for k, v in row.items() if v is not None} for row in rows)
    lines = written(tmp_path / "a.jsonl", *without)
    tokenizer = Tokenizer.load(tiny_dir.path)
    wanted = list(read_texts(lines, tokenizer))
    assert list(read_texts(tmp_path / "a.parquet", tokenizer)) == wanted
    assert len(wanted) == 600


def test_what_is_wrong_with_parquet_is_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet")
    with pytest.raises(ValueError, match=r"cannot read data file .*a.parquet"):
        list(read_texts(path))
    for rows, message in [
        ([{"body": "a"}], "has the columns body; expected `prompt`"),
        ([{"text": "a"}, {"text": None}], "line 2: expected a JSON object"),
        ([{"prompt": 5}], "line 1: expected a JSON object.*not a string"),
    ]:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        with pytest.raises(ValueError, match=message):
            list(read_texts(path))
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), path)
    with pytest.raises(ValueError, match="holds no text"):
        list(read_texts(path))
