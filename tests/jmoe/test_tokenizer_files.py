"""What the files beside `tokenizer.json` say: special tokens, and chat templates by name.

Expected texts and ids are those of transformers 5.24, `AutoTokenizer` and `apply_chat_template`.
"""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import jmoe
from jmoe.tokenizer import Tokenizer, TokenizerError, copy_tokenizer, read_settings

GOLDEN = Path(__file__).parents[1] / "golden"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "other")
SHOWN = " ".join(f"{name[0]}={{{{ {name}_token }}}}" for name in NAMES)
SOME = {"content": "<e>", "lstrip": False, "normalized": False, "rstrip": False}
SOME |= {"single_word": False}
DECODER = {"3": {"content": "<e>", "special": True}}


def write(directory, config=None, tokens=None, files=None):
    """Writes a tokenizer of letters, `<b>`, `<e>` and `<n>`, of which `<e>` alone is special, with
    files beside it.
    """
    words = ["?", "<b>", "<n>", "<e>", "a", "b", "h", "i", " "]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<e>"])
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    found = dict(files or {})
    if config is not None:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": SHOWN}
        found["tokenizer_config.json"] = json.dumps(kind | config)
    if tokens is not None:
        found["special_tokens_map.json"] = json.dumps(tokens)
    for name, text in found.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)


def loaded(directory, *args, **options):
    write(directory, *args, **options)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer is not None
    return tokenizer


EVERY = {f"{name}_token": name.upper() for name in NAMES if name not in ("bos", "eos", "other")}


@pytest.mark.parametrize(
    ("config", "tokens", "text"),
    [
        ({}, {"bos_token": "<b>", "eos_token": SOME}, "b=<b> e=<e> u= s= p= c= m= i= o="),
        ({}, EVERY, "b= e= u=UNK s=SEP p=PAD c=CLS m=MASK i=IMAGE o="),
        # The map wins, also with nothing, and what it does not name stays.
        (
            {"bos_token": "<e>", "eos_token": "<e>", "pad_token": "<n>"},
            {"bos_token": "<b>", "eos_token": SOME | {"content": "<b>"}},
            "b=<b> e=<b> u= s= p=<n> c= m= i= o=",
        ),
        (
            {"bos_token": "<e>", "eos_token": "<e>"},
            {"bos_token": None},
            "b= e=<e> u= s= p= c= m= i= o=",
        ),
        ({"bos_token": "<e>"}, {"bos_token": ""}, "b= e= u= s= p= c= m= i= o="),
        # With these in the configuration the map is not read.
        (
            {"bos_token": "<e>", "added_tokens_decoder": DECODER},
            {"bos_token": "<b>", "eos_token": "<b>"},
            "b=<e> e= u= s= p= c= m= i= o=",
        ),
        (
            {"added_tokens_decoder": {}},
            {"bos_token": "<b>", "eos_token": "<b>"},
            "b= e= u= s= p= c= m= i= o=",
        ),
        # A model's own.
        (
            {"extra_special_tokens": {"image_token": "<n>"}, "other_token": "<b>"},
            None,
            "b= e= u= s= p= c= m= i=<n> o=<b>",
        ),
        (
            {"other_token": {"__type": "AddedToken", **SOME}},
            None,
            "b= e= u= s= p= c= m= i= o=<e>",
        ),
        (
            {"other_token": "<e>"},
            {"extra_special_tokens": {"image_token": "<n>"}, "other_token": SOME},
            "b= e= u= s= p= c= m= i=<n> o=<e>",
        ),
        ({"additional_special_tokens": ["<n>"]}, None, "b= e= u= s= p= c= m= i= o="),
    ],
)
def test_templates_get_the_special_tokens_of_both_files(tmp_path, config, tokens, text):
    tokenizer = loaded(tmp_path, config, tokens)
    assert tokenizer.chat(HI) == text


def test_a_map_is_enough(tmp_path):
    tokens = {"bos_token": "<b>", "eos_token": "<b>"}
    tokenizer = loaded(tmp_path, None, tokens, files={"chat_template.jinja": SHOWN})
    assert tokenizer.chat(HI) == "b=<b> e=<b> u= s= p= c= m= i= o="


@pytest.mark.parametrize(
    ("config", "tokens", "ids", "plain"),
    [
        ({}, {}, [0, 5, 0, 4, 0, 0, 0, 3, 5], "?b?a???b"),
        ({}, {"bos_token": "<b>"}, [1, 4, 0, 0, 0, 3, 5], "a???b"),
        ({"pad_token": "<n>"}, {"bos_token": "<b>"}, [1, 4, 2, 3, 5], "ab"),
        ({"additional_special_tokens": ["<n>"]}, None, [0, 5, 0, 4, 2, 3, 5], "?b?ab"),
        ({}, {"additional_special_tokens": ["<n>"]}, [0, 5, 0, 4, 2, 3, 5], "?b?ab"),
        ({"extra_special_tokens": {"image_token": "<n>"}}, None, [0, 5, 0, 4, 2, 3, 5], "?b?ab"),
    ],
)
def test_named_tokens_are_special_in_a_text(tmp_path, config, tokens, ids, plain):
    tokenizer = loaded(tmp_path, config, tokens)
    assert tokenizer.encode("<b>a<n><e>b") == ids
    assert "".join(tokenizer.decode(ids).split(" ")) == plain


def test_a_special_token_keeps_its_flags(tmp_path):
    tokenizer = loaded(tmp_path, {}, {"bos_token": SOME | {"content": "<b>", "rstrip": True}})
    assert tokenizer.encode("<b>  a") == [1, 4]


def test_a_named_token_that_has_no_id_gets_none(tmp_path):
    """Unlike with transformers: a model has no embedding for a new one."""
    tokenizer = loaded(tmp_path, {}, {"bos_token": "<new>"})
    assert tokenizer.backend.get_vocab_size() == 9


def test_a_text_begins_with_a_token_that_the_map_names(tmp_path):
    config = {"add_bos_token": True, "add_eos_token": True, "tokenizer_class": "LlamaTokenizerFast"}
    tokenizer = loaded(tmp_path, config, {"bos_token": "<b>", "eos_token": SOME})
    assert tokenizer.encode("hi") == [1, 6, 7, 3]


def templates(*names):
    return [{"name": name, "template": name.upper()} for name in names]


NONE, NO = "none is default", "no chat template; send plain text"
JINJA = {"chat_template.jinja": "J"}


def more(**texts):
    return {f"additional_chat_templates/{name}.jinja": text for name, text in texts.items()}


@pytest.mark.parametrize(
    ("template", "files", "plain", "with_tools"),
    [
        (templates("default", "tool_use"), {}, "DEFAULT", "TOOL_USE"),
        (templates("default", "rag"), {}, "DEFAULT", "DEFAULT"),
        (templates("rag", "tool_use"), {}, NONE, "TOOL_USE"),
        (templates("rag"), {}, NONE, NONE),
        (
            [*templates("default"), {"name": "default", "template": "last"}],
            {},
            "last",
            "last",
        ),
        ({"default": "D", "tool_use": "T"}, {}, "D", "T"),
        # Files win over the configuration, one over all of it.
        ("C", JINJA, "J", "J"),
        (templates("default", "tool_use"), JINJA, "J", "J"),
        (templates("default", "tool_use"), JINJA | more(tool_use="JT"), "J", "JT"),
        ("C", more(tool_use="JT"), NONE, "JT"),
        (templates("default", "tool_use"), more(rag="JR"), NONE, NONE),
        ("C", more(default="XD"), "XD", "XD"),
        ("C", JINJA | more(default="XD"), "XD", "XD"),
        # Of the processor of a model that sees images, to which transformers would send a chat.
        (None, {"chat_template.json": '{"chat_template": "X"}'}, "X", "X"),
        ("C", {"chat_template.json": '{"chat_template": "X"}'}, "C", "C"),
        (None, JINJA | {"chat_template.json": '{"chat_template": "X"}'}, "J", "J"),
    ],
)
def test_a_chat_gets_the_template_that_transformers_takes(
    tmp_path, template, files, plain, with_tools
):
    tokenizer = loaded(tmp_path, {"chat_template": template}, files=files)
    calls = ({}, plain), ({"tools": None}, plain), ({"tools": TOOLS}, with_tools)
    for options, want in (*calls, ({"tools": []}, with_tools)):
        if want in (NONE, NO):
            with pytest.raises(TokenizerError, match=want):
                tokenizer.chat(HI, options)
            assert not tokenizer.chat_template(options)
        else:
            assert tokenizer.chat(HI, options) == tokenizer.chat_template(options) == want


def test_a_chat_without_its_template_says_which_there_are(tmp_path):
    tokenizer = loaded(tmp_path, {"chat_template": templates("tool_use", "rag")})
    with pytest.raises(TokenizerError, match="templates are rag, tool_use, and none is default"):
        tokenizer.chat(HI)
    with pytest.raises(TokenizerError, match=r"default; send tools, or .*engine\.chat_template"):
        tokenizer.chat(HI)


def test_a_given_template_takes_the_place_of_all(tmp_path):
    write(tmp_path / "model", {"chat_template": templates("default", "tool_use")})
    (tmp_path / "own.jinja").write_text("own")
    tokenizer = Tokenizer.load(tmp_path / "model", tmp_path / "own.jinja")
    assert tokenizer is not None
    assert tokenizer.chat(HI) == tokenizer.chat(HI, {"tools": TOOLS}) == "own"


@pytest.mark.parametrize(
    ("config", "tokens", "says"),
    [
        ({"chat_template": []}, None, "chat_template is an empty list; give it a template"),
        ({"chat_template": ["x"]}, None, "chat_template.0 must have texts, name"),
        ({"chat_template": [{"name": "default"}]}, None, "chat_template.0 must have"),
        ({"chat_template": {"default": "x", "rag": 3}}, None, "chat_template.1 must have"),
        ({}, {"bos_token": 3}, "bos_token is 3; it must be text, or an object with content"),
        ({"eos_token": ["x"]}, None, r'eos_token is \["x"\]; it must be'),
        ({}, [1], "special_tokens_map.json holds a list, not an object"),
    ],
)
def test_what_cannot_be_is_named(tmp_path, config, tokens, says):
    write(tmp_path, config, tokens)
    with pytest.raises(TokenizerError, match=says) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_all_that_is_read_is_copied(tmp_path):
    given, copied = tmp_path / "given", tmp_path / "copied"
    files = JINJA | more(tool_use="JT", rag="JR") | {"README.md": "no"}
    write(given, {}, {"bos_token": "<b>"}, files)
    copied.mkdir()
    copy_tokenizer(given, copied)
    assert read_settings(copied) == read_settings(given)
    assert not (copied / "README.md").exists()
    assert Tokenizer.load(copied) is not None


def test_jmoes_own_format_keeps_them(tmp_path, copy):
    directory = copy("qwen2_moe")
    files = JINJA | more(tool_use="JT")
    write(directory, {}, {"bos_token": "<b>"}, files)
    jmoe.save(jmoe.load(directory), tmp_path / "saved")
    tokenizer = jmoe.load(tmp_path / "saved").tokenizer
    assert tokenizer is not None
    assert tokenizer.chat(HI, {"tools": TOOLS}) == "JT"
    assert tokenizer.special_tokens["bos_token"] == "<b>"


@pytest.mark.parametrize(
    ("config", "named", "ends"),
    [({}, "<e>", (2, 3)), ({"eos_token_id": [3, 5]}, "<e>", (3, 5)), ({}, "<none>", (2,))],
)
def test_the_tokenizers_end_of_text_ends_answers_too(config, named, ends, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2_moe", directory)
    write(directory, {"eos_token": named})
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"eos_token_id": 2} | config))
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert jmoe.load(directory, "float32").config.eos_token_ids == ends
    family = jmoe.load_family({"one": directory, "two": GOLDEN / "qwen2_moe"}, dtype="float32")
    assert family.models[0].config.eos_token_ids == ends
