"""Tool calls in the formats of models, whole and in every split, against what they stand for."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.frontend.openai.tool_parsers import PARSERS, Delta, parser_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "tags": {"type": "array"},
        "any": {"type": ["string", "null"]},
    },
}
TYPED = {
    "properties": {
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "nothing": {"type": "null"},
        "inner": {"type": "object"},
        "zip": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": ["string", "integer"]},
        "either": {"oneOf": [{"type": ["string"]}, {"type": "boolean"}]},
        "some": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]},
    }
}
FUNCTIONS = {"weather": SCHEMA, "now": {}, "typed": TYPED}
PARIS = ("weather", '{"city": "Paris"}')


def read(parser, pieces):
    """Returns content and calls of deltas joined."""
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    content, calls = "", []
    for delta in deltas:
        assert sum(map(bool, delta._replace(id=""))) == 1  # each says one thing
        assert delta.name or not delta.id
        content += delta.content
        if delta.name:
            calls.append((delta.name, ""))
        if delta.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


HERMES = [
    ("Hello, world.\n", "Hello, world.\n", []),
    ("", "", []),
    ("a < b and <tool> and <tool_cal", "a < b and <tool> and <tool_cal", []),
    ('<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>', "", [PARIS]),
    (
        'Let me see.\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n'
        "</tool_call>\n",
        "Let me see.",
        [PARIS],
    ),
    (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "",
        [PARIS, ("now", "{}")],
    ),
    ('<tool_call>{"name":"now","arguments":{}}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")]),
    ('<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [PARIS]),
    ('<tool_call>{"name": "weather", "parameters": {"city": "Paris"}}</tool_call>', "", [PARIS]),
    (
        r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Paris\"}"}</tool_call>',
        "",
        [PARIS],
    ),
    (
        '<tool_call>{"id": 1, "x": [{}, "}"], "name": "weather", "arguments": {"city": "Paris"}, '
        '"y": -1.5e3}</tool_call> Done.',
        " Done.",
        [PARIS],
    ),
    (
        r'<tool_call>{"name": "weather", "arguments": {"city": "a\"b\\", "x": "\u00e9 \n"}}'
        "</tool_call>",
        "",
        [("weather", r'{"city": "a\"b\\", "x": "\u00e9 \n"}')],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Zürich 東京 😀"}}</tool_call>',
        "",
        [("weather", '{"city": "Zürich 東京 😀"}')],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call><tool_call>{}]"}}'
        "</tool_call>",
        "",
        [("weather", '{"city": "</tool_call><tool_call>{}]"}')],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Par',
        "",
        [("weather", '{"city": "Par')],
    ),
    ('Well. <tool_call>\n{"name": "wea', 'Well. <tool_call>\n{"name": "wea', []),
    ("<tool_call>", "<tool_call>", []),
    (
        "<tool_call>\nweather in Paris\n</tool_call> so",
        "<tool_call>\nweather in Paris\n</tool_call> so",
        [],
    ),
    (
        '<tool_call>{"name": 5}</tool_call><tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": 5}</tool_call>',
        [("now", "{}")],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}\n'
        '<tool_call>{"name": "now", "arguments": {}}',
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}}\n</tool_call>',
        "",
        [PARIS],
    ),
]
IN_TAGS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
ERNIE = [
    ("Hello.", "Hello.", []),
    (f"\n\n\n{IN_TAGS}", "", [PARIS]),
    (f"\n\n{IN_TAGS}\n{IN_TAGS}", "", [PARIS, PARIS]),
    (f"I look.\n\n{IN_TAGS}", "I look.", [PARIS]),
]
MISTRAL = [
    ("Hello [you].", "Hello [you].", []),
    ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]', "", [PARIS]),
    (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}, "id": "VvvODy9mT"}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [PARIS, ("now", "{}")],
    ),
    ('Sure. [TOOL_CALLS][{"arguments": {}, "name": "now"}]\n', "Sure.", [("now", "{}")]),
    ('[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [PARIS]),
    (
        'I look. [TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[ARGS]{}',
        "I look.",
        [PARIS, ("now", "{}")],
    ),
    ('[TOOL_CALLS]weather[CALL_ID]VvvODy9mT[ARGS]{"city": "Paris"}', "", [PARIS]),
    ('[TOOL_CALLS]weather{"city": "Paris"}', "", [PARIS]),
    ('[TOOL_CALLS]{"name": "weather", "arguments": {"city": "Paris"}}', "", [PARIS]),
    (
        r'[TOOL_CALLS]weather[ARGS]{"city": "[TOOL_CALLS]\"[ARGS]{ 東"}',
        "",
        [("weather", r'{"city": "[TOOL_CALLS]\"[ARGS]{ 東"}')],
    ),
    ('[TOOL_CALLS]weather[ARGS]{"city": ["Par', "", [("weather", '{"city": ["Par')]),
    ("[TOOL_CALLS]weather[ARGS]", "", [("weather", "")]),
    ("[TOOL_CALLS]weather", "[TOOL_CALLS]weather", []),
    ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ('[TOOL_CALLS][{"name": "now"', '[TOOL_CALLS][{"name": "now"', []),
    (
        '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"nam',
        ', {"nam',
        [("now", "{}")],
    ),
    ("[TOOL_CALLS]what is this? {}", "[TOOL_CALLS]what is this? {}", []),
    ("[TOOL_CALL]x", "[TOOL_CALL]x", []),
]
THOUGHT = "<|channel|>analysis<|message|>They want to know.<|end|><|start|>assistant"
HARMONY = [
    ("<|channel|>final<|message|>Hello.", "Hello.", []),
    (THOUGHT + "<|channel|>final<|message|>Hello < you.<|return|>", "Hello < you.", []),
    (
        THOUGHT + "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "",
        [PARIS],
    ),
    (
        THOUGHT + "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
        '{"city": "Paris"}',  # `<|call|>` ends the text, and is not in it
        "",
        [PARIS],
    ),
    (
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        "",
        [PARIS],
    ),
    (
        "<|channel|>commentary<|message|>First the weather.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather code<|message|>{"city": "Paris"}<|call|>',
        "First the weather.",
        [PARIS],
    ),
    (
        '<|channel|>commentary to=functions.weather<|message|>{"city": "Paris"}<|call|><|start|>'
        "assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        "",
        [PARIS, ("now", "{}")],
    ),
    ("<|channel|>commentary to=functions.now<|message|><|call|>", "", [("now", "{}")]),
    ("<|channel|>analysis to=functions.now<|message|>{}", "", [("now", "{}")]),
    (
        r'<|channel|>commentary to=functions.weather<|message|>{"city": "<|call|>\"<|end|> 東"}',
        "",
        [("weather", r'{"city": "<|call|>\"<|end|> 東"}')],
    ),
    (
        '<|channel|>commentary to=functions.weather<|message|>{"city": "Pa',
        "",
        [("weather", '{"city": "Pa')],
    ),
    (
        "<|channel|>commentary to=functions.weather<|message|>Paris<|call|>",
        "",
        [("weather", "Paris")],
    ),
    ("<|channel|>commentary to=functions.wea", "", []),
    (THOUGHT, "", []),
    ("<|channel|>analysis<|message|>They wa", "", []),
    ("<|channel|>final<|message|>Hel", "Hel", []),
    ("No channel at all.", "No channel at all.", []),
    ("", "", []),
]


def glm(name, *arguments):
    told = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in arguments
    )
    return f"<tool_call>{name}{told}\n</tool_call>"


GLM = [
    ("Hello <you>.", "Hello <you>.", []),
    (glm("weather", ("city", "Paris")), "", [PARIS]),
    (
        "\n" + glm("weather", ("city", "Paris"), ("days", "3"), ("unit", "C")),
        "",
        [("weather", '{"city": "Paris", "days": 3, "unit": "C"}')],
    ),
    ("I look.\n" + glm("weather", ("city", "Paris")) + "\n", "I look.", [PARIS]),
    (glm("weather", ("city", "Paris")) + "\n" + glm("now"), "", [PARIS, ("now", "{}")]),
    ("<tool_call>now</tool_call>", "", [("now", "{}")]),
    (
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "",
        [PARIS],
    ),
    (glm("weather", ("city", "3")), "", [("weather", '{"city": "3"}')]),
    (glm("weather", ("days", "three")), "", [("weather", '{"days": "three"}')]),
    (glm("weather", ("days", "NaN")), "", [("weather", '{"days": "NaN"}')]),
    (glm("weather", ("any", "null")), "", [("weather", '{"any": null}')]),
    (glm("weather", ("any", "10115")), "", [("weather", '{"any": "10115"}')]),
    (glm("weather", ("tags", '["a", {"b": 1}]')), "", [("weather", '{"tags": ["a", {"b": 1}]}')]),
    (glm("weather", ("what", "else")), "", [("weather", '{"what": "else"}')]),
    (
        glm("weather", ("city", 'a "b"\\\n\t</arg> 東京 😀 ')),
        "",
        [("weather", '{"city": "a \\"b\\"\\\\\\n\\t</arg> 東京 😀 "}')],
    ),
    (
        glm("weather", ("city", "</tool_call><tool_call>")),
        "",
        [("weather", '{"city": "</tool_call><tool_call>"}')],
    ),
    (glm("weather", ("city", "")), "", [("weather", '{"city": ""}')]),
    (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        "",
        [("weather", '{"city": "Par')],
    ),
    ("<tool_call>weather\n<arg_key>ci", "", [("weather", '{"ci')]),
    ("<tool_call>weath", "<tool_call>weath", []),
    ("<tool_call>\nin Paris\n</tool_call>", "<tool_call>\nin Paris\n</tool_call>", []),
    (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<tool_call>now</tool_call>",
        "",
        [PARIS, ("now", "{}")],
    ),
]


def deepseek(*calls, plain=False):
    told = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        if plain
        else f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{('' if plain else chr(10)).join(told)}<｜tool▁calls▁end｜>"


DEEPSEEK = [
    ("Hello <｜you｜>.", "Hello <｜you｜>.", []),
    (deepseek(PARIS), "", [PARIS]),
    (deepseek(PARIS, plain=True), "", [PARIS]),
    (deepseek(PARIS, ("now", "{}")), "", [PARIS, ("now", "{}")]),
    (deepseek(PARIS, ("now", "{}"), plain=True), "", [PARIS, ("now", "{}")]),
    ("I look.\n\n" + deepseek(PARIS), "I look.", [PARIS]),
    (deepseek(PARIS) + "\nDone.", "\nDone.", [PARIS]),
    (deepseek(("now", "")), "", [("now", "{}")]),
    (
        deepseek(("weather", '{\n  "city": "Zürich 東"\n}')),
        "",
        [("weather", '{\n  "city": "Zürich 東"\n}')],
    ),
    (
        deepseek(("weather", r'{"city": "```\"<｜tool▁call▁end｜>\\"}')),
        "",
        [("weather", r'{"city": "```\"<｜tool▁call▁end｜>\\"}')],
    ),
    (
        deepseek(("weather", r'{"city": "{<｜tool▁calls▁end｜>"}'), plain=True),
        "",
        [("weather", r'{"city": "{<｜tool▁calls▁end｜>"}')],
    ),
    (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "",
        [("now", "{}")],
    ),
    (deepseek(PARIS).rpartition("\n```")[0], "", [PARIS]),
    (
        deepseek(PARIS).partition("ris")[0],
        "",
        [("weather", '{"city": "Pa')],
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>wea",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>wea",
        [],
    ),
    (
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>what is this?\n{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>what is this?\n{}",
        [],
    ),
    ("<｜tool▁calls▁begin｜>", "", []),
    ("", "", []),
]


def kimi(*calls):
    told = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(told)}<|tool_calls_section_end|>"


KIMI_HEAD = "<|tool_calls_section_begin|><|tool_call_begin|>"
KIMI = [
    ("Hello <|you|>.", "Hello <|you|>.", []),
    (kimi(PARIS), "", [PARIS]),
    (kimi(PARIS, ("now", "{}")), "", [PARIS, ("now", "{}")]),
    ("I look.\n" + kimi(PARIS), "I look.", [PARIS]),
    (kimi(PARIS) + "\nDone.", "\nDone.", [PARIS]),
    (kimi(("now", "")), "", [("now", "{}")]),
    (kimi(PARIS).replace("functions.", ""), "", [PARIS]),
    (kimi(PARIS).replace(":0<", ":12 <"), "", [PARIS]),
    (kimi(("a.b-c_d", '{\n  "x": 1\n}')), "", [("a.b-c_d", '{\n  "x": 1\n}')]),
    (
        kimi(("weather", r'{"city": "<|tool_call_end|>{\"東\\"}')),
        "",
        [("weather", r'{"city": "<|tool_call_end|>{\"東\\"}')],
    ),
    (kimi(PARIS).partition("ris")[0], "", [("weather", '{"city": "Pa')]),
    (f"{KIMI_HEAD}functions.wea", "<|tool_call_begin|>functions.wea", []),
    (
        kimi(PARIS).replace(":0", "") + kimi(("now", "{}")),
        '<|tool_call_begin|>functions.weather<|tool_call_argument_begin|>{"city": "Paris"}',
        [("now", "{}")],
    ),
    (
        f"{KIMI_HEAD}functions.f:0<|tool_call_end|>" + kimi(("now", "{}")),
        "<|tool_call_begin|>functions.f:0",
        [("now", "{}")],
    ),
    ("<|tool_calls_section_begin|>", "", []),
    ("", "", []),
]


def invoke(name, *arguments):
    told = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<invoke name="{name}">\n{told}</invoke>\n'


def minimax(*invokes):
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


IN_PARIS = invoke("weather", ("city", "Paris"))
MINIMAX = [
    ('Hello <you>, <invoke name="x">.', 'Hello <you>, <invoke name="x">.', []),
    (minimax(IN_PARIS), "", [PARIS]),
    ("\n" + minimax(IN_PARIS) + "\n", "", [PARIS]),
    ("I look.\n" + minimax(IN_PARIS, invoke("now")), "I look.", [PARIS, ("now", "{}")]),
    (minimax(IN_PARIS) + "\n" + minimax(invoke("now")), "", [PARIS, ("now", "{}")]),
    (minimax(IN_PARIS) + " Done.", " Done.", [PARIS]),
    (minimax(IN_PARIS).replace("\n", ""), "", [PARIS]),
    (
        minimax(
            invoke("weather", ("city", "3"), ("days", "3"), ("unit", "C"), ("tags", '["a", {}]'))
        ),
        "",
        [("weather", '{"city": "3", "days": 3, "unit": "C", "tags": ["a", {}]}')],
    ),
    (
        minimax(
            invoke(
                "typed",
                *(("number", "-1.5e3"), ("flag", "true"), ("nothing", "null")),
                *(("inner", '{"a": [1]}'), ("zip", "10115"), ("count", "7"), ("either", "[1]")),
                ("some", "[1]"),
            )
        ),
        "",
        [
            (
                "typed",
                '{"number": -1.5e3, "flag": true, "nothing": null, "inner": {"a": [1]}, '
                '"zip": "10115", "count": 7, "either": "[1]", "some": [1]}',
            )
        ],
    ),
    (
        minimax(invoke("typed", ("zip", "null"), ("count", "seven"), ("either", "false"))),
        "",
        [("typed", '{"zip": null, "count": "seven", "either": false}')],
    ),
    (
        minimax(invoke("typed", ("zip", '"10115"'), ("flag", "True"), ("number", "NaN"))),
        "",
        [("typed", '{"zip": "10115", "flag": "True", "number": "NaN"}')],
    ),
    (
        minimax(invoke("weather", ("city", ' a "b"\\\n\t</invoke></x> 東京 😀\n'))),
        "",
        [("weather", '{"city": " a \\"b\\"\\\\\\n\\t</invoke></x> 東京 😀\\n"}')],
    ),
    (
        minimax(invoke("weather", ("city", "</minimax:tool_call><minimax:tool_call>"))),
        "",
        [("weather", '{"city": "</minimax:tool_call><minimax:tool_call>"}')],
    ),
    (minimax(IN_PARIS).partition("ris")[0], "", [("weather", '{"city": "Pa')]),
    (minimax(IN_PARIS).partition('ity">')[0], "", [("weather", '{"c')]),
    (minimax(IN_PARIS).partition("\n</mini")[0] + "\n</minim", "", [PARIS]),
    (minimax(IN_PARIS).replace("</invoke>\n", "") + "!", "!", [PARIS]),
    (
        minimax(IN_PARIS.replace("</invoke>\n", ""), invoke("now")),
        "",
        [PARIS, ("now", "{}")],
    ),
    (
        minimax(IN_PARIS).replace("</minimax:tool_call>", "") + minimax(invoke("now")),
        "",
        [PARIS, ("now", "{}")],
    ),
    ('<minimax:tool_call>\n<invoke name="wea', '<minimax:tool_call>\n<invoke name="wea', []),
    ("<minimax:tool_call>\n<invo", "<minimax:tool_call>\n<invo", []),
    ("<minimax:tool_call>", "<minimax:tool_call>", []),
    (
        "<minimax:tool_call>\nweather\n</minimax:tool_call> so",
        "<minimax:tool_call>\nweather\n</minimax:tool_call> so",
        [],
    ),
    (minimax(invoke("a b")), minimax(invoke("a b")), []),
    (
        minimax(IN_PARIS, invoke("a b")),
        '<invoke name="a b">\n</invoke>\n</minimax:tool_call>',
        [PARIS],
    ),
    ("", "", []),
]


def coder(name, *arguments):
    told = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>"


CODED = coder("weather", ("city", "Paris"))
CODE = "def f(a):\n\treturn \"</x>\" if a < 3 else '\\n'\n"
QWEN3_CODER = [
    (
        "Hello <you>, <function> and <parameter=x>.",
        "Hello <you>, <function> and <parameter=x>.",
        [],
    ),
    (CODED, "", [PARIS]),
    ("\n\n" + CODED + "\n", "", [PARIS]),
    ("I look.\n" + CODED + "\n" + coder("now"), "I look.", [PARIS, ("now", "{}")]),
    (CODED + coder("now") + " Done.", " Done.", [PARIS, ("now", "{}")]),
    (CODED.replace("\n", ""), "", [PARIS]),
    (
        coder("weather", ("city", "3"), ("days", "3"), ("unit", "C"), ("tags", '[\n"a", {}\n]')),
        "",
        [("weather", '{"city": "3", "days": 3, "unit": "C", "tags": [\n"a", {}\n]}')],
    ),
    (
        coder(
            "typed",
            *(("number", "-1.5e3"), ("flag", "true"), ("nothing", "null"), ("zip", "10115")),
            *(("inner", '{"a": [1]}'), ("count", "7"), ("either", "[1]"), ("some", "[1]")),
        ),
        "",
        [
            (
                "typed",
                '{"number": -1.5e3, "flag": true, "nothing": null, "zip": "10115", '
                '"inner": {"a": [1]}, "count": 7, "either": "[1]", "some": [1]}',
            )
        ],
    ),
    (  # as Python writes it, which a template does
        coder("typed", ("flag", "True"), ("nothing", "None"), ("zip", "None"), ("number", "None")),
        "",
        [("typed", '{"flag": true, "nothing": null, "zip": null, "number": null}')],
    ),
    (
        coder("weather", ("city", "None"), ("days", "three"), ("unit", "True"), ("any", "True")),
        "",
        [("weather", '{"city": "None", "days": "three", "unit": "True", "any": "True"}')],
    ),
    (  # what the schema does not have is text
        coder("weather", ("what", "3")) + coder("else", ("what", "[1]")),
        "",
        [("weather", '{"what": "3"}'), ("else", '{"what": "[1]"}')],
    ),
    (
        coder("weather", ("city", CODE), ("days", "3")),
        "",
        [("weather", json.dumps({"city": CODE, "days": 3}))],
    ),
    (coder("weather", ("city", "\n a\n\n")), "", [("weather", '{"city": "\\n a\\n\\n"}')]),
    (coder("weather", ("city", "")), "", [("weather", '{"city": ""}')]),
    (
        "<tool_call><function=weather><parameter=city>\n</parameter></function></tool_call>",
        "",
        [("weather", '{"city": ""}')],
    ),
    (
        coder("weather", ("city", "a </function>\n</tool_call> <tool_call> b 東京 😀")),
        "",
        [("weather", '{"city": "a </function>\\n</tool_call> <tool_call> b 東京 😀"}')],
    ),
    (  # tags behind values are missing
        coder("weather", ("city", "Paris"), ("days", "3")).replace("\n</parameter>", ""),
        "",
        [("weather", '{"city": "Paris", "days": 3}')],
    ),
    (
        CODED.replace("</parameter>\n", "") + "\n" + coder("weather", ("days", "3")),
        "",
        [PARIS, ("weather", '{"days": 3}')],
    ),
    (CODED.replace("</function>\n", "") + "!", "!", [PARIS]),
    (CODED.replace("</function>\n</tool_call>", "") + coder("now"), "", [PARIS, ("now", "{}")]),
    (CODED.replace("\n</tool_call>", "") + coder("now"), "", [PARIS, ("now", "{}")]),
    (  # several in one pair of tags
        CODED.replace("</tool_call>", "") + coder("else").replace("<tool_call>\n", ""),
        "",
        [PARIS, ("else", "{}")],
    ),
    (  # tags around functions are missing
        "I look.\n" + CODED.replace("<tool_call>\n", "") + "\n" + CODED[12:-12] + "Done.",
        "I look.Done.",
        [PARIS, PARIS],
    ),
    ("Write <function=else> or <function=", "Write <function=else> or <function=", []),
    (CODED.partition("ris")[0], "", [("weather", '{"city": "Pa')]),
    (CODED.partition("\n</param")[0] + "\n", "", [("weather", '{"city": "Paris')]),
    (CODED.partition("ity>")[0], "", [("weather", '{"c')]),
    (CODED.partition("\n</tool")[0] + "\n</too", "", [PARIS]),
    ("<tool_call>\n<function=wea", "<tool_call>\n<function=wea", []),
    ("<tool_call>\n<func", "<tool_call>\n<func", []),
    ("<tool_call>", "<tool_call>", []),
    (
        "<tool_call>\nweather\n</tool_call> so",
        "<tool_call>\nweather\n</tool_call> so",
        [],
    ),
    (coder("a b") + CODED, coder("a b"), [PARIS]),
    ("", "", []),
]
GLM47 = [
    (glm("weather", ("city", "Paris")).replace("\n", ""), "", [PARIS]),
    (f"I look.{glm('now')}".replace("\n", ""), "I look.", [("now", "{}")]),
]
CASES = [
    (name, number, *case)
    for name, cases in {
        "hermes": HERMES,
        "mistral": MISTRAL,
        "openai": HARMONY,
        "glm45": GLM,
        "glm47": GLM47,
        "deepseek_v3": DEEPSEEK,
        "ernie45": ERNIE,
        "kimi_k2": KIMI,
        "minimax_m2": MINIMAX,
        "qwen3_coder": QWEN3_CODER,
        "qwen3_xml": [(CODED, "", [PARIS])],
    }.items()
    for number, case in enumerate(cases)
]


@pytest.mark.parametrize(
    ("name", "output", "content", "calls"),
    [(name, *case) for name, _, *case in CASES],
    ids=[f"{name}-{number}" for name, number, *_ in CASES],
)
def test_what_a_model_wrote_is_read_in_every_split(name, output, content, calls):
    wanted = content, calls
    assert read(PARSERS[name](FUNCTIONS), [output]) == wanted
    assert read(PARSERS[name](FUNCTIONS), output) == wanted, "character by character"
    for at in range(1, len(output)):
        assert read(PARSERS[name](FUNCTIONS), [output[:at], output[at:]]) == wanted, at


def test_every_format_has_its_cases():
    assert {name for name, *_ in CASES} == set(PARSERS)


_MARKERS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|channel|>"),
        *("<|message|>", "<|end|>", "<|start|>", "<|call|>", "to=functions.f ", "analysis"),
        *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "\n", " "),
        *('{"name": "f", "arguments": ', '{"a": "x"}', '"', "{", "}", "[", "]", ",", ":", "\\"),
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "functions.f:0"),
        *("<minimax:tool_call>", '<invoke name="', '">', '<parameter name="', "</parameter>"),
        *("</invoke>", "</minimax:tool_call>", "zip", "typed", "<function=", "</function>", ">"),
        *("<parameter=", "<function=weather>\n", "<parameter=city>\n", "<parameter=zip>\n"),
        *("weather", "city", "<", "東", '"arguments"', '"name"', r'"\ud800"', "null", "1e999"),
    ]
)


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=60)
@given(pieces=st.lists(_MARKERS, max_size=14), cuts=st.lists(st.integers(0, 200), max_size=4))
def test_no_output_breaks_a_parser_and_its_split_does_not_matter(name, pieces, cuts):
    output = "".join(pieces)
    ends = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    split = [output[start:end] for start, end in pairwise(ends)]
    whole = read(PARSERS[name](FUNCTIONS), [output])
    assert read(PARSERS[name](FUNCTIONS), split) == whole
    assert read(PARSERS[name](FUNCTIONS), output) == whole
    json.dumps(whole).encode()


def test_text_is_released_as_soon_as_it_cannot_be_a_marker():
    parser = PARSERS["hermes"]({})
    got = [parser.push(piece) for piece in ("Hi", " <to", "y> ", '<tool_call>{"name": "f", "argu')]
    got.append(parser.push('ments": {"a'))
    got.append(parser.push('": 1'))
    assert got == [
        [Delta("Hi")],
        [],
        [Delta(" <toy>")],
        [],
        [Delta(name="f"), Delta(arguments='{"a')],
        [Delta(arguments='": 1')],
    ]


@pytest.mark.parametrize("split", [False, True])
def test_a_call_has_the_id_that_its_model_wrote(split):
    output = kimi(PARIS, ("now", "{}")).replace("functions.now:1", "now:7")
    parser = PARSERS["kimi_k2"](FUNCTIONS)
    deltas = [delta for piece in (output if split else [output]) for delta in parser.push(piece)]
    calls = [(delta.name, delta.id) for delta in deltas if delta.name]
    assert calls == [("weather", "functions.weather:0"), ("now", "now:7")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "hermes"),
        ("{{ '<tool_call>' }}{{ '<arg_key>' }}", "glm45"),
        ("{{- '<tool_call>\\n<function=' + name + '>\\n<parameter=' + key }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|channel|>analysis' }}", "openai"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek_v3"),
        ("{{- '\\n' ~ '<minimax:tool_call>' }}<response>", "minimax_m2"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}", "kimi_k2"),
        ("{{ messages[0].content }}", None),
    ],
)
def test_a_template_tells_the_format(template, name):
    assert parser_of(template) is PARSERS.get(name)
