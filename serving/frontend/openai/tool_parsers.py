"""The formats in which models write tool calls: reads them piece by piece, and makes grammars.

A parser takes an output's text as it comes and gives deltas; an answer that is not streamed is its
deltas joined, so that there is one way to read it. What looks like a call and cannot be read as one
is content, and nothing is lost. White space beside a call is dropped, and brackets too many.
Half a marker at an output's end is content, too: a text may be cut there, `x = [` for one, which
could begin Mistral's. vLLM has it in whole answers; its streams drop it (Hermes) or not (Mistral).

A call has begun for a client with its name, so that one whose arguments never close stays a call,
with them as far as they were written: they are not completed, lest a client runs what the model did
not say. It ends at the format's next marker, behind which text is content again. A marker in a
string may be part of it: it is where the value closes as JSON.
"""

import json
import re
import string
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from serving.request import guided

Schema = Mapping[str, Any]
Marker = Callable[[str], str]
"""Returns how a grammar writes a marker: as a token, where the tokenizer has one for it."""
Reading = Generator[None]
"""What `yield`s where it needs more text."""

_NAME = re.compile(r"[\w.-]{1,128}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]{1,128}):\d{1,9}")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_MARKER = re.compile(r"(<[^<>%]+>|\[[A-Z_]+\])")
"""What is a marker in a format's own text."""


class Delta(NamedTuple):
    """What a piece of text adds to an answer. `name` begins a call; `arguments` is JSON text that
    belongs to the newest call; `reasoning` is what the model thinks before it answers. `id` is that
    of a call whose model writes one.
    """

    content: str = ""
    name: str = ""
    arguments: str = ""
    reasoning: str = ""
    id: str = ""


class ToolParser:
    """Reads one output. A format says in `read` how calls are written, in steps that wait for text
    (`yield from`), and in `around` and `section` what a grammar of calls looks like.
    """

    opening = ""  # marker at which calls begin in what is otherwise text; empty: there is none
    encloses = False  # whether it stands once before several calls, not before each
    behind = string.whitespace + "]}"  # characters behind arguments that are no content
    around = "", ""  # what a call has before its arguments, `%s` being its name, and behind them
    section = "", ""  # what is before all calls, and behind them
    between = r'"\n"'  # what a grammar has between two calls

    def __init__(self, functions: Mapping[str, Schema], template: str = "") -> None:
        """`functions` has the JSON schema of the arguments by name; `template` is the model's chat
        template, which tells variants of a format apart.
        """
        self.functions, self.template = functions, template
        self._left = ""  # text that was not consumed yet
        self._ended = False
        self._deltas: list[Delta] = []
        self._space = ""  # behind the content, which is dropped if a call follows
        self._pause = ""  # behind the thoughts, which is dropped if none follow
        self._num_calls = 0
        self._argued = False  # the newest call has arguments
        self._raw: list[str] | None = None  # what may yet turn out to be content
        self._reading = self.read()

    def push(self, text: str) -> list[Delta]:
        """Takes the next piece of the output."""
        self._left += text
        next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Delta]:
        """Returns what is left when the output has ended."""
        self._ended = True
        next(self._reading, None)
        if self._space and not self._num_calls:
            self._deltas.append(Delta(self._space))
        return self._taken()

    def read(self) -> Reading:
        """Reads the whole output."""
        raise NotImplementedError

    def grammar(self, names: Sequence[str], many: bool, marker: Marker) -> str:
        """Returns a grammar, in Lark's syntax, of a call of one of these functions, or, with
        `many`, of several.
        """
        lines = ["call: " + " | ".join(f"call{i}" for i in range(len(names)))]
        for i, name in enumerate(names):
            lines += self.rules(i, name, self.functions[name], marker)
        return "\n".join([self.start(many, marker), *lines])

    def grammar_in_text(self, names: Sequence[str], many: bool, marker: Marker, tokens: str) -> str:
        """Returns a grammar of any text, in which the opening marker begins what `grammar` says;
        empty: such a grammar cannot be. `tokens` are further ones, beside text, as a grammar writes
        them.
        """
        if not self.opening:
            return ""
        opening = marker(self.opening)
        head = f"head: {opening}" if _is_token(opening) else f"head[suffix={opening}]: {_TEXT}"

        def after(text: str) -> str:
            return '""' if text == self.opening else marker(text)

        calls = self.grammar(names, many and self.encloses, after).replace("start", "calls", 1)
        free = "free: (SOME" + (f" | {tokens}" if tokens else "") + ")*"
        some = "SOME: " + _TEXT.replace("*", "+")
        return "\n".join(["start: (free head calls)* free", head, free, some, calls])

    def rules(self, i: int, name: str, schema: Schema, marker: Marker) -> list[str]:
        """Returns the rule `call{i}`, and those that it needs."""
        return [f"call{i}: {self.written(name, f'args{i}', marker)}", f"args{i}: {_json(schema)}"]

    def start(self, many: bool, marker: Marker) -> str:
        """Returns the rule `start`, which uses the rule `call`."""
        before, after = (_spelled(text, "", marker) for text in self.section)
        return f"start: {before} call {f'({self.between} call)*' if many else ''} {after}"

    def written(self, name: str, arguments: str, marker: Marker) -> str:
        """Returns how a call is written; `arguments` is the rule of its arguments."""
        if not any(self.around):
            raise NotImplementedError(f"{type(self).__name__} does not say how a call is written")
        before, after = (_spelled(text, name, marker) for text in self.around)
        return f"{before} {arguments} {after}"

    # ---- what an output is made of --------------------------------------------------------------

    def say(self, text: str) -> None:
        """Adds content."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._deltas.append(Delta(said))

    def think(self, text: str) -> None:
        """Adds to the thoughts."""
        text = self._pause + text
        thought = text.rstrip()
        self._pause = text[len(thought) :]
        if thought:
            self._deltas.append(Delta(reasoning=thought))

    def begin(self, name: str, id: str = "") -> None:
        """Begins a call. `id` is the one that the model wrote, if it did."""
        self._space, self._argued, self._raw = "", False, None
        self._num_calls += 1
        self._deltas.append(Delta(name=name, id=id))

    def argue(self, text: str) -> None:
        """Adds to the arguments of the newest call."""
        if text:
            self._argued = True
            self._deltas.append(Delta(arguments=text))

    def keep(self, marker: str) -> None:
        """Begins what is a call, or content if it cannot be read as one (`give_up`)."""
        self._raw = [marker]

    def give_up(self) -> None:
        """Makes content of what was consumed since `keep`."""
        raw, self._raw = self._raw or [], None
        self.say("".join(raw))

    def peek(self) -> Generator[None, None, str]:
        """Skips white space and returns the next character, empty at the output's end."""
        while True:
            self._consume(len(self._left) - len(self._left.lstrip()))
            if self._left or self._ended:
                return self._left[:1]
            yield

    def skip(self, tag: str, *, stay: bool = False) -> Generator[None, None, bool]:
        """Consumes white space and, unless `stay`, a tag, if that comes next; returns whether it
        did.
        """
        while True:
            left = self._left.lstrip()
            if left.startswith(tag):
                self._consume(len(self._left) - len(left) + (0 if stay else len(tag)))
                return True
            if self._ended or not tag.startswith(left):
                return False
            yield

    def until(
        self,
        *markers: str,
        take: Callable[[str], object] | None = None,
        stay: bool = False,
        in_call: bool = False,
    ) -> Generator[None, None, str]:
        """Consumes text up to the first of `markers` and, unless `stay`, it; returns which one,
        empty if the output ended before it. `take` gets the text, in pieces; `in_call`: without
        the beginning of a marker at the output's end.
        """
        while True:
            found = [(at, one) for one in markers if (at := self._left.find(one)) >= 0]
            at, marker = min(found, default=(len(self._left), ""))
            if not found and (in_call or not self._ended):  # a marker may have begun
                at -= max(_overlap(self._left, one) for one in markers)
            text = self._consume(at)
            if text and take is not None:
                take(text)
            if found and not stay:
                self._consume(len(marker))
            if self._ended and not found:
                self._consume(len(self._left))
            if found or self._ended:
                return marker
            yield

    def text(
        self, *markers: str, stay: bool = False, in_call: bool = False
    ) -> Generator[None, None, tuple[str, str]]:
        """Consumes as `until`; returns the text before the marker, and the marker."""
        pieces: list[str] = []
        marker = yield from self.until(*markers, take=pieces.append, stay=stay, in_call=in_call)
        return "".join(pieces), marker

    def json(self, take: Callable[[str], object], *ends: str) -> Generator[None, None, bool]:
        """Consumes the object, list or string that begins with the next character; returns whether
        it is whole. `take` gets its text, in pieces. One of the markers `ends` cuts it; one in a
        string does unless the value is JSON with it, and until that is known nothing more is taken.
        """
        depth, in_string, escaped = 0, False, False
        at = 0  # what is left is read up to here
        firsts = {end[0] for end in ends}
        pieces: list[str] = []  # what was taken

        def taken(count: int) -> None:
            if text := self._consume(count):
                pieces.append(text)
                take(text)

        in_doubt = -1  # where the first marker in a string is
        follows = False  # a string has just ended, behind that
        while True:
            while at < len(self._left):
                char = self._left[at]
                if follows and not char.isspace():
                    if char not in ",:]}":
                        taken(in_doubt)
                        return False
                    if not depth:  # the value is that string
                        taken(at)
                        return True
                    follows = False
                if char in firsts and in_doubt < 0:
                    if self._left.startswith(ends, at):
                        if not in_string:
                            taken(at)
                            return False
                        in_doubt = at
                    elif not self._ended and any(one.startswith(self._left[at:]) for one in ends):
                        break
                at += 1
                if in_string:
                    in_string = escaped or char != '"'
                    escaped = char == "\\" and not escaped
                    follows = in_doubt >= 0 and not in_string
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                if depth or in_string or follows:
                    continue
                whole = in_doubt < 0 or closes("".join([*pieces, self._left[:at]]))
                taken(at if whole else in_doubt)
                return whole
            if in_doubt >= 0:
                if self._ended:
                    taken(in_doubt)
                    return False
            else:
                taken(at)
                at = 0
                if self._ended:
                    return False
            yield

    def value(self, *ends: str) -> Generator[None, None, str]:
        """Consumes a JSON value, up to one of the markers `ends`, and returns its text."""
        if (yield from self.peek()) not in ("{", "[", '"'):
            return (yield from self.text(",", "}", "]", *ends, stay=True))[0]
        pieces: list[str] = []
        yield from self.json(pieces.append, *ends)
        return "".join(pieces)

    def leave(self, *markers: str) -> Generator[None, None, str]:
        """Makes content of what is behind a call's arguments and before one of `markers`, without
        what may be `behind` them; returns which marker comes.
        """
        while not (left := self._left.lstrip(self.behind)) and not self._ended:
            self._consume(len(self._left))
            yield
        self._consume(len(self._left) - len(left))
        return (yield from self.until(*markers, take=self.say, stay=True, in_call=True))

    def call_object(self, *ends: str) -> Generator[None, None, bool]:
        """Consumes a call that is a JSON object with `name` and `arguments`, from its `{` on;
        returns whether it was one. The markers `ends` cut it (see `json`).
        """
        name, arguments, begun = "", "", False
        self._consume(1)
        while (yield from self.peek()) in ('"', ","):
            if self.accept(","):
                continue
            key = yield from self.value(*ends)
            yield from self.peek()
            if not self.accept(":"):
                return begun
            is_arguments = key in ('"arguments"', '"parameters"')
            if is_arguments and name and not begun and (yield from self.peek()) == "{":
                begun = True
                self.begin(name)
                yield from self.json(self.argue, *ends)
                continue
            value = yield from self.value(*ends)
            if key == '"name"':
                name = name or _text(value)
            elif is_arguments:
                arguments = value
        if not self.accept("}"):
            return begun
        if name and not begun:
            self.begin(name)
            self.argue(_as_object(arguments))
        return begun or bool(name)

    def accept(self, tag: str) -> bool:
        """Consumes a tag if what is left begins with it; returns whether it does."""
        found = self._left.startswith(tag)
        self._consume(len(tag) if found else 0)
        return found

    def _consume(self, count: int) -> str:
        text, self._left = self._left[:count], self._left[count:]
        if self._raw is not None:
            self._raw.append(text)
        return text

    def _taken(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, ERNIE-4.5."""

    opening = "<tool_call>"
    around = '<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>"

    def read(self) -> Reading:
        """See ToolParser."""
        ends = opening, closing = self.opening, "</tool_call>"
        while (yield from self.until(opening, take=self.say)):
            self.keep(opening)
            if (yield from self.peek()) == "{" and (yield from self.call_object(*ends)):
                yield from self.leave(*ends)
                self.accept(closing)
            else:
                self.give_up()


class Mistral(ToolParser):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or, newer, `[TOOL_CALLS]name[ARGS]{}`
    for each call.
    """

    opening, encloses = "[TOOL_CALLS]", True
    around = '{"name": "%s", "arguments": ', "}"
    section, between = ("[TOOL_CALLS][", "]"), '", "'

    def __init__(self, functions: Mapping[str, Schema], template: str = "") -> None:
        """See ToolParser."""
        super().__init__(functions, template)
        if "[ARGS]" in template:
            self.encloses, self.around = False, ("[TOOL_CALLS]%s[ARGS]", "")
            self.section, self.between = ("", ""), ""

    def read(self) -> Reading:
        """See ToolParser."""
        while (yield from self.until(self.opening, take=self.say)):
            self.keep(self.opening)
            first = yield from self.peek()
            if first == "[" and not (yield from self.skip(self.opening, stay=True)):
                self._consume(1)
                yield from self._list()
            elif first == "{":
                if not (yield from self.call_object(self.opening)):
                    self.give_up()
            else:
                yield from self._named()

    def _list(self) -> Reading:
        while (yield from self.peek()) == "{":
            if not (yield from self.call_object(self.opening)):
                break
            self.keep("")
            yield from self.peek()
            if self.accept("]"):
                self._raw = None
                return
            self.accept(",")
        self.give_up()

    def _named(self) -> Reading:
        begins = "[ARGS]", "[CALL_ID]", "{"
        name, found = yield from self.text(*begins, self.opening, stay=True)
        if found not in begins or not _NAME.fullmatch(name.strip()):
            self.give_up()
            return
        if found == "[CALL_ID]":
            yield from self.until("[ARGS]", "{", self.opening, stay=True)
        self.begin(name.strip())
        self.accept("[ARGS]")
        if (yield from self.peek()) == "{":
            yield from self.json(self.argue, self.opening)
        else:
            text, _ = yield from self.text(self.opening, stay=True)
            self.argue(text.rstrip())


class Harmony(ToolParser):
    """gpt-oss: messages in channels. A call has a recipient; the model thinks in `analysis`."""

    around = "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>", ""

    def read(self) -> Reading:
        """See ToolParser."""
        ended, begins = ("<|end|>", "<|call|>", "<|return|>"), ("<|start|>", "<|channel|>")
        ends = (*ended, *begins)
        stays: Any = {"take": self.say, "stay": True, "in_call": True}
        behind = partial(self.until, *ends, "<|message|>", **stays)  # an ended message
        between = ""  # thoughts
        while True:
            header, found = yield from self.text("<|message|>")
            if not found:
                if not any(one in header for one in ("<|channel|>", "<|start|>")):
                    self.say(header)  # no message at all
                return
            if self.functions and (to := _RECIPIENT.search(header)) is not None:
                self.begin(to[1])
                if (yield from self.peek()) == "{":
                    yield from self.json(self.argue, *ends)
                    yield from self.leave(*ends)
                else:
                    yield from self.until(*ends, take=self.argue, stay=True)
                if not self._argued:
                    self.argue("{}")
            elif "analysis" in header:
                self._pause, between = between, "\n"
                yield from self.until(*ends, take=self.think, stay=True)
            else:
                yield from self.until(*ends, take=self.say, stay=True)
            while (marker := (yield from behind())) in ended:
                self._consume(len(marker))

    def start(self, many: bool, marker: Marker) -> str:
        """See ToolParser. An answer has one call, whose end is the answer's."""
        end = marker("<|end|>")
        if not _is_token(end):  # thoughts have no end that text cannot have
            return "start: call"
        think = _spelled("<|channel|>analysis<|message|>", "", marker)
        again = _spelled("<|start|>assistant", "", marker)
        return f"start: ({think} TEXT {end} {again})? call\nTEXT: {_TEXT}"

    def grammar_in_text(self, names: Sequence[str], many: bool, marker: Marker, tokens: str) -> str:
        """See ToolParser. What comes before the answer or the call is in other channels."""
        end = marker("<|end|>")
        if not _is_token(end):
            return ""
        before, message = marker("<|channel|>"), f"{marker('<|message|>')} TEXT"
        again = _spelled("<|start|>assistant", "", marker)
        other = f'{before} ("analysis" | "commentary") {message} {end} {again}'
        calls = self.grammar(names, many, marker).partition("\nTEXT")[2].partition("\n")[2]
        first = f'start: ({other})* ({before} "final" {message} | call)'
        return "\n".join([first, f"TEXT: {_TEXT}", calls])


class _Tagged(ToolParser):
    """Calls with each argument between tags. Strings are written as they are, so that the
    function's schema has to say what is one. A format says in `key` how an argument's name is read.
    """

    before, closing = "", ""  # markers before an argument's name, and behind its value
    keyed: tuple[str, ...] = ()  # tags around an argument's name, `%s`, up to its value
    gap = r'"\n"'
    """What a grammar has between tags."""
    last = ""
    """What it has behind a value, before the tag."""

    def arguments(self, function: str, *ends: str) -> Generator[None, None, str]:
        """Consumes the arguments of a call, up to one of the markers `ends`; returns which, empty
        if the output ended before. What is between them is no argument and becomes content.
        """
        self.argue("{")
        before = ""
        other: list[str] = []
        while True:
            text, marker = yield from self.text(self.before, *ends, stay=True, in_call=True)
            other.append(text.strip())
            if not self.accept(self.before):
                break
            name, has_value = yield from self.key(*ends)
            if has_value:
                self.argue(f"{before}{_dumped(name)}: ")
                yield from self._argument(function, name, *ends)
                before = ", "
            elif self._left:  # one of `ends`
                other.append(name)
            else:
                self.argue(before + _dumped(name)[:-1])
        if marker:
            self.argue("}")
        self.say("".join(other))
        return marker

    def key(self, *ends: str) -> Generator[None, None, tuple[str, bool]]:
        """Consumes an argument's name and what is between it and the value; returns the name, and
        whether there is a value, not the output's end or one of `ends`.
        """
        raise NotImplementedError

    def _argument(self, function: str, name: str, *ends: str) -> Reading:
        schema = _properties(self.functions.get(function, {})).get(name)
        if _is_string(schema):
            self.argue('"')
            ended = yield from self._value(*ends, take=lambda text: self.argue(_dumped(text)[1:-1]))
            self.argue('"' if ended else "")
            return
        pieces: list[str] = []
        ended = yield from self._value(*ends, take=pieces.append)
        text = "".join(pieces)
        if not (text or ended):
            return
        self.argue(self.typed(text, schema) or _dumped(text)[: None if ended else -1])

    def typed(self, text: str, schema: Any) -> str:
        """Returns the JSON of a value that its schema does not want as text alone; empty if it is
        text after all.
        """
        return text.strip() if _is_of(text.strip(), schema) else ""

    def _value(self, *ends: str, take: Callable[[str], object]) -> Generator[None, None, str]:
        """Consumes a value; returns the marker behind it, empty if the output ended before. It ends
        at `closing`, or else before the first of `ends`, which may be part of it: that is so if
        `closing` comes and no other argument before it, and what follows waits until that is known.
        """
        marker = yield from self.until(self.closing, *ends, take=take, stay=True)
        while marker in ends:
            at, other = self._left.find(self.closing), self._left.find(self.before)
            if at >= 0 and not 0 <= other < at:
                take(self._consume(at))
                marker = self.closing
            elif other >= 0 or self._ended:
                return marker
            else:
                yield
        self._consume(len(marker))
        return marker

    def rules(self, i: int, name: str, schema: Schema, marker: Marker) -> list[str]:
        """See ToolParser. Each argument is held to its own schema, apart from strings, which are
        held to an enumeration alone.
        """
        required = schema.get("required")
        arguments: list[str] = []
        lines: list[str] = []
        end = marker(self.closing)
        for n, (key, one) in enumerate(_properties(schema).items()):
            rule = f"value{i}x{n}"
            tail = f"{self.last}{end} {self.gap}"
            if not _is_string(one):
                defs = {
                    at: schema[at] for at in ("$defs", "definitions", "x-guidance") if at in schema
                }
                lines.append(f"{rule}: {_json({**defs, **one} if isinstance(one, dict) else one)}")
            elif one.get("enum"):
                lines.append(f"{rule}: {' | '.join(map(_dumped, one['enum']))}")
            elif _is_token(end):
                lines.append(f"{rule}: {_TEXT}")
                tail = f"{end} {self.gap}"
            else:
                lines.append(f"{rule}[suffix={end}]: {_TEXT}")
                tail = self.gap
            tags = f" {self.gap} ".join(_spelled(text, key, marker) for text in self.keyed)
            text = f"{tags} {rule} {tail}"
            is_required = isinstance(required, list) and key in required
            arguments.append(text if is_required else f"({text})?")
        between = " ".join([self.gap, *arguments])
        return [f"call{i}: {self.written(name, between, marker)}", *lines]


class Glm(_Tagged):
    """GLM-4.5 and 4.7: a call's name, then each argument. The newer has no line breaks."""

    gap = r'"\n"?'
    opening = "<tool_call>"
    around = "<tool_call>%s", "</tool_call>"
    before, closing = "<arg_key>", "</arg_value>"
    keyed = "<arg_key>%s</arg_key>", "<arg_value>"

    def read(self) -> Reading:
        """See ToolParser."""
        opening, closing = self.opening, "</tool_call>"
        while (yield from self.until(opening, take=self.say)):
            self.keep(opening)
            name, found = yield from self.text(self.before, closing, opening, stay=True)
            if found in (self.before, closing) and _NAME.fullmatch(name.strip()):
                self.begin(name.strip())
                yield from self.arguments(name.strip(), closing, opening)
                self.accept(closing)
            else:
                self.accept(closing)
                self.give_up()

    def key(self, *ends: str) -> Generator[None, None, tuple[str, bool]]:
        """See _Tagged."""
        name, _ = yield from self.text("</arg_key>", *ends, stay=True)
        if self.accept("</arg_key>"):
            yield from self.until("<arg_value>", *ends, stay=True)
        return name.strip(), self.accept("<arg_value>")


class MiniMax(_Tagged):
    """MiniMax-M2: `<invoke name="...">` for each call, all between markers."""

    opening, encloses = "<minimax:tool_call>", True
    section, between = ("<minimax:tool_call>\n", "</minimax:tool_call>"), ""
    around = '<invoke name="%s">', "</invoke>\n"
    before, closing = '<parameter name="', "</parameter>"
    keyed = ('<parameter name="%s">',)

    def read(self) -> Reading:
        """See ToolParser."""
        opening, invoke, closing = self.opening, '<invoke name="', "</minimax:tool_call>"
        between = invoke, closing, opening
        ends = "</invoke>", *between
        while (yield from self.until(opening, take=self.say)):
            self.keep(opening)
            yield from self.skip(invoke, stay=True)
            marker = ""
            while marker in ("", invoke):
                name, found = "", ""
                if self.accept(invoke):
                    name, found = yield from self.text('">', *ends, stay=True)
                if found == '">' and _NAME.fullmatch(name):
                    self.accept('">')
                    self.begin(name)
                    yield from self.arguments(name, *ends)
                    self.accept("</invoke>")
                    marker = yield from self.leave(*between)
                    self.accept(closing)
                else:
                    self.give_up()
                    marker = yield from self.until(*between, take=self.say, stay=True)
                if not marker:
                    return
                self.keep("")

    def key(self, *ends: str) -> Generator[None, None, tuple[str, bool]]:
        """See _Tagged."""
        name, _ = yield from self.text('">', *ends, stay=True)
        return name, self.accept('">')


class Qwen3Coder(_Tagged):
    """Qwen3-Coder, Qwen3.5, Step-3.5 and Nemotron-3: `<function=NAME>` between `<tool_call>` tags,
    which may be missing around a function that there is. A value is on lines of its own.
    """

    opening = "<tool_call>"
    around = "<tool_call>\n<function=%s>", "</function>\n</tool_call>"
    before, closing = "<parameter=", "</parameter>"
    keyed = ("<parameter=%s>\n",)
    last = r'"\n" '

    def read(self) -> Reading:
        """See ToolParser."""
        function, closing = "<function=", "</tool_call>"
        between = self.opening, function, closing
        ends = "</function>", *between
        inside = False  # the tags
        while marker := (yield from self.until(self.opening, function, take=self.say)):
            self.keep(marker)
            inside = inside or marker == self.opening
            name, found = "", ""
            if marker == function or (yield from self.skip(function)):
                name, found = yield from self.text(">", *ends, stay=True)
            if found == ">" and _NAME.fullmatch(name) and (inside or name in self.functions):
                self.accept(">")
                self.begin(name)
                yield from self.arguments(name, *ends)
                self.accept("</function>")
                yield from self.leave(*between)
                if self.accept(closing):
                    inside = False
            else:
                self.accept(closing)
                self.give_up()
                inside = False

    def key(self, *ends: str) -> Generator[None, None, tuple[str, bool]]:
        """See _Tagged."""
        name, _ = yield from self.text(">", *ends, stay=True)
        if not self.accept(">"):
            return name, False
        while not (self._left or self._ended):
            yield
        self.accept("\n")
        return name, True

    def _value(self, *ends: str, take: Callable[[str], object]) -> Generator[None, None, str]:
        """See _Tagged. The next argument's tag ends a value, too, at the beginning of a line."""
        line = ""  # a line break, which is no part of the value before a tag

        def taken(text: str) -> None:
            nonlocal line
            text = line + text
            value = text.removesuffix("\n")
            line = text[len(value) :]
            if value:
                take(value)

        return (yield from super()._value(f"\n{self.before}", *ends, take=taken))

    def typed(self, text: str, schema: Any) -> str:
        """See _Tagged. An argument that the schema does not have is text. Templates write some
        values as Python does: `True`, `None`.
        """
        if schema is None:
            return ""
        word = text.strip().lower()
        word = "null" if word == "none" else word
        if word in ("true", "false", "null") and _kinds(schema) and _is_of(word, schema):
            return word
        return super().typed(text, schema)


class _Section(ToolParser):
    """Calls in a section, each between markers. A format says in `header` what comes before a
    call's arguments.
    """

    encloses = True
    marks = "", ""  # markers between which a call stands

    def read(self) -> Reading:
        """See ToolParser."""
        begins, closing = self.marks[0], self.section[1]
        ends = *self.marks, *self.section
        among = False  # calls
        while marker := (yield from self.until(*ends, take=self.say, in_call=among)):
            among = marker != closing
            if marker != begins:
                continue
            self.keep(begins)
            name, id = yield from self.header(*ends)
            first = yield from self.peek()
            if not first or not _NAME.fullmatch(name):
                self.give_up()
                continue
            self.begin(name, id)
            if first == "{":
                yield from self.json(self.argue, *ends)
            else:
                text, _ = yield from self.text(*ends, stay=True)
                self.argue(text.rstrip().removesuffix("```").rstrip() or "{}")
            yield from self.leave(*ends)

    def header(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """Consumes what comes before the arguments, up to one of the markers `ends`; returns the
        name and the id, if any.
        """
        raise NotImplementedError


class DeepSeek(_Section):
    """DeepSeek V2, V3 and R1, with the arguments in a code block, and V3.1, without."""

    opening = "<｜tool▁calls▁begin｜>"
    section, between = (opening, "<｜tool▁calls▁end｜>"), ""
    marks = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    around = "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    behind = _Section.behind + "`"

    def __init__(self, functions: Mapping[str, Schema], template: str = "") -> None:
        """See ToolParser."""
        super().__init__(functions, template)
        if "```" in template:
            before = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n"
            self.around, self.between = (before, "\n```<｜tool▁call▁end｜>"), ToolParser.between

    def header(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """See _Section."""
        separator = "<｜tool▁sep｜>"
        name, _ = yield from self.text(separator, *ends, stay=True)
        if not self.accept(separator):
            return "", ""
        first = yield from self.peek()
        if name.strip() == "function" and first != "{":  # it is the kind
            name, _ = yield from self.text("\n", "```", "{", *ends, stay=True)
            if (yield from self.skip("```")):
                yield from self.skip("json")
        elif first not in ("{", "[", '"') and not (yield from self.skip(self.marks[1], stay=True)):
            return "", ""
        return name.strip(), ""


class Kimi(_Section):
    """Kimi-K2: a call begins with its id, `functions.NAME:NUMBER`; the template wants it back."""

    opening = "<|tool_calls_section_begin|>"
    section, between = (opening, "<|tool_calls_section_end|>"), ""
    marks = "<|tool_call_begin|>", "<|tool_call_end|>"
    around = "<|tool_call_begin|>functions.%s:", "<|tool_call_end|>"

    def header(self, *ends: str) -> Generator[None, None, tuple[str, str]]:
        """See _Section."""
        begins = "<|tool_call_argument_begin|>"
        text, _ = yield from self.text(begins, *ends, stay=True)
        written = _KIMI_ID.fullmatch(text.strip())
        return (written[1], written[0]) if written and self.accept(begins) else ("", "")

    def written(self, name: str, arguments: str, marker: Marker) -> str:
        """See ToolParser."""
        number = f"/[0-9]{{1,4}}/ {marker('<|tool_call_argument_begin|>')}"
        return super().written(name, f"{number} {arguments}", marker)


PARSERS: dict[str, type[ToolParser]] = {
    "glm45": Glm,
    "glm47": Glm,
    "hermes": Hermes,
    "mistral": Mistral,
    "openai": Harmony,
    "deepseek_v3": DeepSeek,
    "ernie45": Hermes,
    "kimi_k2": Kimi,
    "minimax_m2": MiniMax,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
}
"""By vLLM's names."""
_MARKERS: dict[str, type[ToolParser]] = {
    "<arg_key>": Glm,
    "<parameter=": Qwen3Coder,
    "<tool_call>": Hermes,
    "[TOOL_CALLS]": Mistral,
    "<|channel|>": Harmony,
    "<｜tool▁call▁begin｜>": DeepSeek,
    "<|tool_call_begin|>": Kimi,
    "<minimax:tool_call>": MiniMax,
}
"""What a chat template has of its model's format; the first that is found counts."""


def parser_of(template: str) -> type[ToolParser] | None:
    """Returns the format that a chat template writes calls in; None: none of these."""
    return next((one for marker, one in _MARKERS.items() if marker in template), None)


_TEXT = r"/(.|\n)*/"
"""What a grammar calls any text; special tokens are none."""


def _is_token(marker: str) -> bool:
    """Returns whether a marker is written as a token."""
    return marker.startswith("<[")


def _overlap(text: str, marker: str) -> int:
    """Returns how many characters of a marker, short of all, a text ends with."""
    tail = text[1 - len(marker) :]
    at = tail.find(marker[0])
    while at >= 0 and not marker.startswith(tail[at:]):
        at = tail.find(marker[0], at + 1)
    return len(tail) - at if at >= 0 else 0


def _dumped(text: str) -> str:
    """Returns a text as JSON, which is how Lark's grammars write it, too."""
    return json.dumps(text, ensure_ascii=False)


def _spelled(text: str, name: str, marker: Marker) -> str:
    """Returns how a grammar writes a text of a format, with `name` in place of its `%s`."""
    return " ".join(
        marker(part) if _MARKER.fullmatch(part) else _dumped(part.replace("%s", name))
        for part in _MARKER.split(text)
        if part
    )


def _json(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = guided(_bare(schema))
    return "%json " + json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _bare(schema: Any) -> Any:
    """Returns a schema without what it says to people, of which a grammar has no use."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: one if key in ("enum", "const") else _bare(one)
        for key, one in schema.items()
        if not (key in ("description", "title") and isinstance(one, str))
    }


def _text(value: str) -> str:
    """Returns the text that a JSON string stands for; empty if it is none."""
    found = json.loads(value) if value.startswith('"') and _is_of(value, {}) else ""
    return found.encode(errors="replace").decode() if isinstance(found, str) else ""


def _as_object(arguments: str) -> str:
    """Returns the arguments that a model wrote out of place, or as a string."""
    arguments = arguments.strip()
    if arguments in ("", "null"):
        return "{}"
    return _text(arguments) or arguments


def closes(text: str) -> bool:
    """Returns whether a text is JSON, in whose strings there may be line breaks."""
    try:
        json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def _is_of(text: str, schema: Any) -> bool:
    """Returns whether a text is JSON, and of one of its schema's types if a string is one, too."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    kinds = _kinds(schema)
    return "string" not in kinds or any(type(found) in _TYPES.get(kind, ()) for kind in kinds)


_TYPES = {
    "string": (str,),
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "object": (dict,),
    "array": (list,),
}


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a schema allows; empty: it does not say."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    found = {kind for kind in kinds if isinstance(kind, str)}
    for key in ("anyOf", "oneOf"):
        others = schema.get(key)
        branches = [_kinds(one) for one in others] if isinstance(others, list) else []
        if not all(branches):
            return set()
        found.update(*branches)
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _properties(schema: Schema) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _is_string(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kind, choices = schema.get("type"), schema.get("enum")
    if choices is None:
        return kind == "string"
    of_text = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
    return kind in (None, "string") and of_text
