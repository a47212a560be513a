"""Chat templates: what they get, what they may refuse, and what becomes of their special tokens."""

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from jmoe.tokenizer import Tokenizer, TokenizerError

HI = [{"role": "user", "content": "hi"}]


def tokenizer(template):
    vocab = {"<s>": 0, "h": 1, "i": 2, "?": 3}
    backend = Backend(models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return Tokenizer(backend, {"chat_template": template, "bos_token": {"content": "<s>"}})


def test_special_tokens_of_a_template_are_there_once():
    found = tokenizer("{{ bos_token }}{{ messages[0].content }}")
    text = found.chat(HI)
    assert text == "<s>hi"
    assert found.encode(text, special_tokens=False) == [0, 1, 2]
    assert found.encode("hi") == [0, 1, 2]


def test_options_are_names_of_the_template():
    found = tokenizer("{{ messages[0].content }}{% if thinking %}!{% endif %}")
    assert (found.chat(HI), found.chat(HI, {"thinking": True})) == ("hi", "hi!")


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt"])
def test_what_the_server_gives_cannot_be_given(name):
    with pytest.raises(TokenizerError, match=f"gets {name} from the server"):
        tokenizer("x").chat(HI, {name: "x"})


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template; send plain text"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "the chat template failed"),
        ("{{ messages[5].content }}", "the chat template failed"),
        ("{% for m in %}", "the chat template failed"),
        ("{{ 1 / 0 }}", "the chat template failed"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "the chat template failed"),
    ],
)
def test_what_a_template_cannot_make_is_one_error(template, says):
    with pytest.raises(TokenizerError, match=says):
        tokenizer(template).chat(HI)


def test_a_template_may_leave_a_loop():
    found = tokenizer("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}")
    assert found.chat(HI * 3) == "hi"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<\u00e9\'>"}'),
        (
            "{{ messages[0] | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
            '{"content":"<\\u00e9\'>","role":"user"}',
        ),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x }}b", "ab"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ pad_token is defined }}{{ eos_token }}", "False"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
    ],
)
def test_a_template_has_what_transformers_gives_it(template, text):
    given = [{"role": "user", "content": "<\u00e9'>"}]
    assert tokenizer(template).chat(given) == text
