"""Thoughts in the formats of models, whole and in every split, and with calls behind them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.frontend.openai.reasoning_parsers import (
    PARSERS,
    Channels,
    ErnieThink,
    KimiThink,
    Think,
    parser_of,
)

OPENED = "<|im_start|>assistant\n<think>\n"
KIMI = "<|tool_calls_section_begin|>"
CHANNELS = "<|channel|>analysis<|message|>"


def read(parser, pieces):
    """Returns thoughts, content and names of calls."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    assert all(sum(map(bool, delta)) == 1 for delta in deltas)  # each says one thing
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        [delta.name for delta in deltas if delta.name],
    )


CASES = [
    ("qwen3", "", "<think>\nOkay, 1 + 1.\n</think>\n\nIt is 2.", "Okay, 1 + 1.", "It is 2."),
    ("qwen3", "", "<think>\n\n</think>\n\nIt is 2.", "", "It is 2."),
    ("qwen3", "", "It is 2.", "", "It is 2."),
    ("qwen3", "", "\n It is <think>", "", "\n It is <think>"),
    ("qwen3", "", "<thinking>", "", "<thinking>"),
    ("qwen3", "", "<thin", "", "<thin"),
    ("qwen3", "", "<think>\nOkay, so", "Okay, so", ""),
    ("qwen3", "", "<think>a < b </thin", "a < b </thin", ""),
    ("qwen3", "", "<think>a\n\n b\n</think>c</think>", "a\n\n b", "c</think>"),
    ("qwen3", "<think>\n\n</think>\n\n", "It is 2.", "", "It is 2."),
    ("qwen3", OPENED, "Okay, 1 + 1.\n</think>\n\nIt is 2.", "Okay, 1 + 1.", "It is 2."),
    ("qwen3", OPENED, "<think>\nOkay.\n</think>\n\nIt is 2.", "Okay.", "It is 2."),
    ("qwen3", OPENED, "</think>\n\nIt is 2.", "", "It is 2."),
    ("qwen3", OPENED, "Okay", "Okay", ""),
    ("qwen3", "", "", "", ""),
    ("deepseek_r1", "<｜Assistant｜><think>\n", "Okay.\n</think>\n\n**2**", "Okay.", "**2**"),
    ("deepseek_r1", "<｜Assistant｜>", "<think>\n\n</think>\n\n2", "", "2"),
    ("deepseek_r1", "<｜Assistant｜></think>", "2", "", "2"),  # V3.1 without thoughts
    ("glm45", "<|assistant|>", "\n<think>Hm.</think>\n2", "Hm.", "2"),
    ("glm45", "<|assistant|>\n<think></think>", "\n2", "", "\n2"),
    ("minimax_m2", "]~b]ai\n<think>\n", "Hm.\n</think>\n\nIt is 2.", "Hm.", "It is 2."),
    (
        "ernie45",
        OPENED,
        "Hm.\n</think>\n\n<response>\nIt is\n\n2.\n</response>\n",
        "Hm.",
        "It is\n\n2.",
    ),
    ("ernie45", OPENED, "Hm.\n</think>\nIt is 2.", "Hm.", "It is 2."),
    ("ernie45", OPENED, "Hm.</think><response>2</response>", "Hm.", "2"),
    ("ernie45", OPENED, "Hm.</think><response>\n2\n</resp", "Hm.", "2\n</resp"),
    ("ernie45", OPENED, "Hm.</think>\n<response>\n2 \n", "Hm.", "2 \n"),
    ("ernie45", OPENED, "Hm.</think>\n<respon", "Hm.", "<respon"),
    ("ernie45", OPENED, "Hm. <response> so", "Hm. <response> so", ""),
    ("ernie45", OPENED, "Hm.\n</think>\n\n\n<tool_call>\n{}", "Hm.", "<tool_call>\n{}"),
    (
        *("ernie45", OPENED, "Hm.</think>\n<response>\n2\n</response>\n\n<tool_call>\n{}"),
        *("Hm.", "2<tool_call>\n{}"),
    ),
    ("ernie45", OPENED, "Hm.</think>2 <response>3</response>", "Hm.", "2 <response>3</response>"),
    ("ernie45", "", "<response>\n2\n</response>", "", "2"),
    ("qwen3", OPENED, "Hm.</think><response>2</response>", "Hm.", "<response>2</response>"),
    ("kimi_k2", "<|im_middle|>", "<think>Hm.</think>2", "Hm.", "2"),
    ("kimi_k2", "<|im_middle|>", "2", "", "2"),
    ("kimi_k2", "", f"<think>Hm. </think>{KIMI}2", "Hm.", f"{KIMI}2"),
    ("kimi_k2", "", f"<think>Hm.\n{KIMI}2</think>", "Hm.", f"{KIMI}2</think>"),
    ("kimi_k2", "", "<think>Hm. <|tool_calls", "Hm. <|tool_calls", ""),
    ("qwen3", "", f"<think>{KIMI}</think>2", KIMI, "2"),
    (
        "openai_gptoss",
        "<|start|>assistant",
        CHANNELS + "Hm.<|end|><|start|>assistant<|channel|>final<|message|>2",
        "Hm.",
        "2",
    ),
    (
        "openai_gptoss",
        "",
        CHANNELS + "Hm. <|end|><|start|>assistant" + CHANNELS + " So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>2<|return|>",
        "Hm.\n So.",
        "2",
    ),
    ("openai_gptoss", "", CHANNELS + "Hm", "Hm", ""),
    ("openai_gptoss", "", "<|channel|>final<|message|>2", "", "2"),
    (
        "openai_gptoss",
        "",
        "<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        "",
        "{}",  # nobody offered a function
    ),
]


@pytest.mark.parametrize(("name", "before", "output", "thoughts", "content"), CASES)
def test_thoughts_are_read_in_every_split(name, before, output, thoughts, content):
    wanted = thoughts, content, []
    kind = PARSERS[name]
    assert read(kind(before), [output]) == wanted
    assert read(kind(before), output) == wanted, "character by character"
    for at in range(1, len(output)):
        assert read(kind(before), [output[:at], output[at:]]) == wanted, at


_PIECES = st.sampled_from(
    [
        *("<think>", "</think>", "\n", " ", "a", "<", "</th", "ink>", "東", "<|message|>"),
        *("<|end|>", "<|channel|>", "<|start|>", "analysis", "final", " to=functions.f "),
        *(KIMI, "<|tool_calls", "<response>", "</response>"),
    ]
)


@pytest.mark.parametrize("kind", [Think, KimiThink, ErnieThink, Channels])
@settings(max_examples=60)
@given(
    pieces=st.lists(_PIECES, max_size=14),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    before=st.sampled_from(["", OPENED]),
)
def test_a_split_does_not_matter_and_no_letter_is_lost(kind, pieces, cuts, before):
    output = "".join(pieces)
    ends = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    split = [output[start:end] for start, end in pairwise(ends)]
    whole = read(kind(before), [output])
    assert read(kind(before), split) == read(kind(before), output) == whole
    if kind is not Channels:
        assert (whole[0] + whole[1]).count("a") == output.count("a")


def test_thoughts_are_released_as_they_come():
    parser = Think("")
    got = [parser.push(piece) for piece in ("<th", "ink>\n", "Hm", " a <", " b.\n", "</think>\n2")]
    assert [["".join(one) for one in each] for each in got] == [
        *([], [], ["Hm"]),
        *([" a"], [" < b."], ["2"]),
    ]


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ content.split('</think>')[-1] }}", Think),
        ("{{ '<|start|>assistant<|channel|>final' }}", Channels),
        (KIMI + "{{ content }}<think></think>", KimiThink),
        ("<global_setting>\\nthink_mode=True{{ content }}<think>\\n", ErnieThink),
        ("<minimax:tool_call>{{ content.split('</think>') }}<response>", Think),
        (KIMI + "{{ content }}", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_tells_the_format(template, kind):
    assert parser_of(template) is kind
