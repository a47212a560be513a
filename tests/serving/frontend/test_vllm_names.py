"""Sampling parameters by vLLM's names, against values written out by hand."""

import json
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.errors import InvalidRequest
from serving.frontend.vllm_names import read_json, sampling
from serving.request import SamplingParams, Structure, StructureKind

DEFAULT = SamplingParams(max_new_tokens=16, temperature=1.0)


def of(**fields) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 16, "temperature": 1.0, **fields})


def test_defaults_are_vllms() -> None:
    assert sampling({}) == DEFAULT
    assert sampling({"max_tokens": None, "seed": None, "n": None}) == DEFAULT


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"max_tokens": 5}, of(max_new_tokens=5)),
        ({"temperature": 0}, of(temperature=0.0)),
        ({"temperature": "0.25", "max_tokens": "7"}, of(temperature=0.25, max_new_tokens=7)),
        ({"temperature": "+2.5e-1", "top_k": "-1"}, of(temperature=0.25)),
        ({"top_k": 3, "top_p": 0.5, "min_p": 0.1}, of(top_k=3, top_p=0.5, min_p=0.1)),
        ({"top_k": -1}, of(top_k=0)),
        ({"seed": 2**64 - 1}, of(seed=2**64 - 1)),
        ({"stop": "x"}, of(stop=("x",))),
        ({"stop": ["x", "yz"]}, of(stop=("x", "yz"))),
        ({"stop_token_ids": [1, "2"]}, of(stop_token_ids=(1, 2))),
        ({"ignore_eos": True}, of(ignore_eos=True)),
        ({"ignore_eos": "True"}, of(ignore_eos=True)),
        ({"logprobs": 0}, of(logprobs=True)),
        ({"logprobs": 3}, of(logprobs=True, top_logprobs=3)),
        ({"presence_penalty": -2, "frequency_penalty": 2}, of(presence_penalty=-2.0, frequency_penalty=2.0)),  # noqa: E501
        ({"repetition_penalty": 1.5}, of(repetition_penalty=1.5)),
        ({"logit_bias": {"5": -100, "6": 1.5}}, of(logit_bias=((5, -100.0), (6, 1.5)))),
        ({"n": 1, "best_of": 1, "min_tokens": 0, "skip_special_tokens": True}, DEFAULT),
        ({"use_beam_search": "false", "include_stop_str_in_output": False}, DEFAULT),
        ({"min_tokens": "3"}, of(min_new_tokens=3)),
        ({"include_stop_str_in_output": True}, of(include_stop=True)),
        ({"skip_special_tokens": "false"}, of(skip_special_tokens=False)),
    ],
)  # fmt: skip
def test_values_are_taken(asked, wanted) -> None:
    assert sampling(asked) == wanted


@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"regex": "[0-9]+"}, StructureKind.REGEX, "[0-9]+"),
        ({"json": '{"type": "integer"}'}, StructureKind.JSON_SCHEMA, '{"type": "integer"}'),
        ({"json": {"type": "integer"}}, StructureKind.JSON_SCHEMA, '{"type": "integer"}'),
        ({"json_object": True}, StructureKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"grammar": 'start: "a"'}, StructureKind.GRAMMAR, 'start: "a"'),
        ({"regex": "a", "json": None, "json_object": False}, StructureKind.REGEX, "a"),
    ],
)
def test_structures(name: str, asked, kind, text) -> None:
    want = of(structure=Structure(kind, text))
    assert sampling({name: asked}) == want
    assert sampling({name: json.dumps(asked)}) == want


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.text(max_size=8))
def test_a_choice_is_an_expression_of_its_strings_alone(choices, other) -> None:
    structure = sampling({"structured_outputs": {"choice": choices}}).structure
    assert structure is not None
    assert structure.kind is StructureKind.REGEX
    for text in (*choices, other):
        assert bool(re.fullmatch(structure.text, text)) == (text in choices)


def test_choices_are_what_the_library_of_masks_takes() -> None:
    llguidance = pytest.importorskip("llguidance")
    choices = ["a b", "c|d", "é\n", "[x]", "-", "#~", '"']
    text = sampling({"structured_outputs": {"choice": choices}}).structure.text
    assert (
        llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_regex(text)) == ""
    )


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"max_token": 5}, "'max_token' is not served; did you mean max_tokens?"),
        ({"lora_name": "a"}, "the sampling parameter 'lora_name' is not served"),
        ({"prompt_logprobs": 1}, "'prompt_logprobs' is not served"),
        ({"bad_words": []}, "'bad_words' is not served"),
        ({"x" * 1000: 1}, "(1000 in all)"),
        ({"max_tokens": 0}, "max_tokens is 0; it must be at least 1"),
        ({"max_tokens": 2**31}, "max_tokens is 2147483648"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": "many"}, "max_tokens is 'many'"),
        ({"temperature": -1}, "temperature is -1.0"),
        ({"temperature": "nan"}, "temperature is 'nan'; it must be a number"),
        ({"temperature": "1e999"}, "temperature is inf; it must be a finite number"),
        *(({"max_tokens": text}, f"max_tokens is {text!r}") for text in ("1_0", " 4 ", "٤", "4.")),
        *(({"top_p": text}, f"top_p is {text!r}") for text in ("0.1_0", " 1 ", "٠.٥", "1e", ".")),
        ({"logit_bias": {"1_0": 1}}, "a token of logit_bias is '1_0'; it must be a whole number"),
        ({"temperature": [1]}, "temperature is [1]; it must be a number"),
        ({"temperature": 10**400}, "must be a finite number"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": [1]}, "stop is 1; it must be a string"),
        ({"stop": ""}, "stop is ''"),
        ({"stop": ["x"] * 65}, "number of values of stop is 65; it must be 64 at most"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be true or false"),
        ({"logprobs": 21}, "top_logprobs is 21"),
        ({"logit_bias": {"a": 1}}, "a token of logit_bias is 'a'"),
        ({"logit_bias": {"1": 101}}, "logit_bias of 1 is 101"),
        ({"logit_bias": {str(i): 0 for i in range(1025)}}, "tokens in logit_bias is 1025"),
        ({"logit_bias": [1]}, "logit_bias is [1]"),
        ({"n": 2}, "n is 2; it must be 1, all that is served"),
        ({"min_tokens": -1}, "min_tokens is -1; it must be at least 0"),
        ({"skip_special_tokens": 1}, "skip_special_tokens is 1; it must be true or false"),
        ({"use_beam_search": True}, "use_beam_search is True; it must be false"),
        ({"structured_outputs": {}}, "structured_outputs is []; it must be one of json, regex"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "['json', 'regex']"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "['whitespace_pattern']"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex is ''"),
        ({"structured_outputs": {"regex": "x" * 65_537}}, "characters of a regex is 65537"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is []"),
        ({"structured_outputs": 5}, "structured_outputs is 5"),
        ({"structured_outputs": "x"}, "structured_outputs is no JSON"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "send either"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(asked, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampling(asked)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[1]", "is [1]; it must be a JSON object"),
        ("5", "is 5; it must be a JSON object"),
        ('{"a": NaN}', "no JSON"),
        ('{"a": 1, "a": 2}', 'duplicate key "a"'),
        ('{"a": {"b": 1, "b": 1}}', 'duplicate key "b"'),
        ("[" * 202 + "]" * 202, "recursion limit"),
        ('{"a":' * 5000, "recursion limit"),
        ("[" * 100_000, "recursion limit"),
        ('{"a": ' + "9" * 5000 + "}", "no JSON"),
    ],
)
def test_what_is_no_object_is_refused(text: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(named)):
        read_json(text, "it")


def test_brackets_in_strings_are_not_depth() -> None:
    text = json.dumps({"structured_outputs": {"regex": "[" * 1000 + '"\\{'}})
    assert read_json(text, "it")["structured_outputs"]["regex"] == "[" * 1000 + '"\\{'


def test_the_worst_text_of_the_largest_size_holds_the_loop_for_little() -> None:
    worst = '{"a":[' + ",".join(["{}"] * 9_000 + ["1"] * 100_000) + "]}"
    cpu = time.process_time()
    read_json(worst, "it")
    assert time.process_time() - cpu < 0.5
