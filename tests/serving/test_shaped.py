"""Structured outputs on the bundled model: what is refused, and when a step waits for whom.

That tokens are those of changed logits is in test_served_equals_notebook.py.
"""

import asyncio
import contextlib
import itertools
import json
import re
import threading

import pytest
from served import until
from shaped import (
    PROMPTS,
    config,
    texts,
)

import jmoe
from serving.engine import Engine
from serving.errors import DeadlineExceeded, InvalidRequest, Overloaded
from serving.execution.fitting import limits_of
from serving.intake import grammars, structure
from serving.request import SamplingParams, Structure, StructureKind
from tests.serving.fake_runner import FakeRunner

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


FEW_PROGRAMS = {"decode_buckets": (8,), "prefill_buckets": (32,), "policy": "fcfs"}


@pytest.fixture(scope="module")
def model():
    return jmoe.load("bundled", "float32")


UNREADABLE = [
    ("regex", "[0-9", "unclosed character class"),
    ("json_schema", '{"type": "nonsense"}', "nonsense"),
    ("json_schema", "{", "json schema '{' cannot be used"),
    ("grammar", "begin: x", "no start rule"),
    ("grammar", "start: a\na: b\nb: a", "cannot be followed"),
]


async def test_what_cannot_be_read_is_refused_alone(model) -> None:
    engine = await Engine.start(config(**FEW_PROGRAMS), model=model)
    try:
        for kind, text, said in UNREADABLE:
            other = asyncio.create_task(texts(engine, PROMPTS[0], max_new_tokens=8))
            wanted = Structure(StructureKind(kind), text)
            with pytest.raises(InvalidRequest, match=re.escape(said)):
                await texts(engine, PROMPTS[1], structure=wanted)
            assert (await other)[2] in ("stop", "length")
    finally:
        await engine.stop()


async def test_a_structure_that_holds_up_all_others_is_ended(model, monkeypatch) -> None:
    monkeypatch.setattr(structure, "BURST_S", 0.0)
    monkeypatch.setattr(structure, "SHARE_S", 1e-9)
    engine = Engine(config(), FakeRunner(limits_of(config(), 1), vocab_size=512), model)
    engine.run()
    try:
        other = asyncio.create_task(texts(engine, PROMPTS[0], max_new_tokens=30))
        slow = Structure(StructureKind.REGEX, "[a-z]{30}")
        with pytest.raises(InvalidRequest, match="1e-06 ms a token"):
            await texts(engine, "say it", structure=slow)
        assert len((await other)[1]) == 30
    finally:
        await engine.stop()


@pytest.mark.deep
async def test_a_structure_takes_no_step_in_vain(model) -> None:
    """It ends with the token that completes it, and not with one more that says so."""
    engine = await Engine.start(config(**FEW_PROGRAMS), model=model)
    try:
        closed = Structure(StructureKind.REGEX, "yes|no")
        text, outputs, reason = await texts(engine, "say it", structure=closed)
        assert (text, reason) in (("yes", "stop"), ("no", "stop"))
        assert model.tokenizer.decode([o.token_ids[0] for o in outputs]) == text
        open_ended = Structure(StructureKind.REGEX, "(ab)+")
        text, outputs, reason = await texts(
            engine, "say it", structure=open_ended, max_new_tokens=9, temperature=3.0
        )
        assert re.fullmatch("(ab)+" if reason == "stop" else "(ab)*a?", text)
    finally:
        await engine.stop()


class Noted(FakeRunner):
    """A runner that records what the tick asks, in order."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.events: list[str] = []

    def launch(self, plan, control):
        waits = plan.shapes is not None and plan.shapes.waits
        self.events.append("launch and wait" if waits else "launch")
        return super().launch(plan, control)

    def draw(self, allowed):
        self.events.append("draw")
        super().draw(allowed)


async def test_layers_are_launched_before_the_token_that_decides_what_may_follow_is_read(model):
    """Step N + 1's layers run while step N's tokens are read; only its drawing waits for them."""
    limits = limits_of(config(), model.config.num_layers)
    runner = Noted(limits, vocab_size=model.config.vocab_size)
    engine = Engine(config(), runner, model)
    engine.run()
    accept = engine._accept
    engine._accept = lambda *args: (runner.events.append("read"), accept(*args))
    try:
        letters = Structure(StructureKind.REGEX, "[a-z]{4}")
        text, _, reason = await texts(engine, "say it", structure=letters)
        assert re.fullmatch("[a-z]{4}", text)
        assert reason == "stop"
        launch = ["launch and wait"]
        # Each token is read behind the launch of the next step, and before that step's drawing;
        # one step more was launched when the last one was read.
        middle = [*launch, "read", "draw"]
        assert runner.events[:14] == [*launch, "draw", *middle * 4]
        assert runner.events[14:] in ([], ["read"])
    finally:
        await engine.stop()


async def test_a_structure_beside_plain_rows_counts_on_as_a_grammar_lets_it(model):
    """FakeRunner counts up, to the next token that is allowed."""
    limits = limits_of(config(), model.config.num_layers)
    engine = Engine(config(), FakeRunner(limits, vocab_size=model.config.vocab_size), model)
    engine.run()
    try:
        digits = Structure(StructureKind.REGEX, "[0-9]{3}")
        plain = SamplingParams(max_new_tokens=12)
        structured = texts(engine, "say it", structure=digits)
        outputs, (text, found, _) = await asyncio.gather(
            _collect(engine.generate([100, 101], plain)), structured
        )
        assert [o.token_ids[0] for o in outputs] == list(range(102, 114))
        ids = [model.tokenizer.encode(str(digit))[0] for digit in range(10)]
        tokens = [o.token_ids[0] for o in found]
        assert set(tokens) <= set(ids)
        assert re.fullmatch("[0-9]{3}", text)
        # From one token on, the next digit that follows by number; at the end from the first on.
        order = sorted(ids)
        for before, after in itertools.pairwise(tokens):
            assert after == next((t for t in order if t > before), order[0])
    finally:
        await engine.stop()


async def _collect(stream) -> list:
    return [output async for output in stream]


def deep_schema(depth: int) -> Structure:
    """Returns a schema nested so deeply that a recursive parser overflows its stack."""
    defs = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(depth)}
    defs[f"a{depth}"] = {"type": "integer"}
    schema = {"$ref": "#/$defs/a0", "$defs": defs}
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema, separators=(",", ":")))


@pytest.mark.deep
async def test_a_structure_that_would_end_its_reader_or_take_minutes_is_refused(model, monkeypatch):
    """It is read in a process of its own first; others are read when that is over."""
    monkeypatch.setattr(structure, "READ_S", 1.0)
    engine = Engine(config(), FakeRunner(limits_of(config(), 1), vocab_size=512), model)
    engine.run()
    try:
        slow = Structure(StructureKind.JSON_SCHEMA, '{"type":"integer","multipleOf":9999991}')
        deep = "takes too much memory, or is nested too deeply"
        for hostile, says in ((deep_schema(1500), deep), (slow, "takes more than 1 s")):
            with pytest.raises(InvalidRequest, match=says):
                await texts(engine, "say it", structure=hostile)
        sampling = SamplingParams(structure=slow, max_new_tokens=40)
        late = engine.generate("say it", sampling, timeout_s=0.2)
        with pytest.raises(DeadlineExceeded, match=r"not read within 0\.2 s"):
            await anext(late)
        fine = Structure(StructureKind.REGEX, "[0-9]{3}")
        assert re.fullmatch("[0-9]{3}", (await texts(engine, "say it", structure=fine))[0])
        monkeypatch.setattr(structure, "MAX_WAITING", 0)
        with pytest.raises(Overloaded, match="wait until their structures are read"):
            await texts(engine, "say it", structure=slow)
    finally:
        await engine.stop()


async def test_who_goes_while_a_structure_is_read_leaves_no_error_behind(model, monkeypatch):
    read = structure.Structures(model)
    parsed, begun, over = grammars.Vocabulary.read, threading.Event(), threading.Event()
    errors = []

    def slowly(*vocabulary, **one):
        begun.set()
        over.wait()
        return parsed(*vocabulary, **one)

    monkeypatch.setattr(grammars.Vocabulary, "read", slowly)
    monkeypatch.setattr(threading, "excepthook", lambda told: errors.append(told.exc_value))
    digits = Structure(StructureKind.REGEX, "[0-9]")
    try:
        asked = asyncio.create_task(read.matcher(digits))
        await asyncio.to_thread(begun.wait)
        (reader,) = (one for one in threading.enumerate() if one.name == "jmoe-structure")
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        over.set()
        await asyncio.to_thread(reader.join)
        assert errors == []
        await read.matcher(digits)
    finally:
        over.set()
        await read.close()


async def test_a_structure_that_is_known_waits_for_no_others(model, monkeypatch):
    read = structure.Structures(model)
    monkeypatch.setattr(structure, "MAX_WAITING", 2)
    known, new = (Structure(StructureKind.REGEX, text) for text in ("[0-9]", "[a-z]"))
    strangers = []
    try:
        await read.matcher(known)
        monkeypatch.setattr(read._checker, "ask", lambda one: asyncio.Event().wait())
        strangers += [asyncio.create_task(read.matcher(new)) for _ in range(2)]
        await until(lambda: read.num_waiting == 2)
        await asyncio.wait_for(read.matcher(known), 20)
        with pytest.raises(Overloaded, match="2 requests wait until their structures are read"):
            await read.matcher(new)
    finally:
        for one in strangers:
            one.cancel()
        await read.close()


async def test_one_output_that_fails_breaks_no_other_with_its_structure(model) -> None:
    """Copies of a matcher share what they learn; one that fails is not copied again."""
    engine = Engine(config(), FakeRunner(limits_of(config(), 1), vocab_size=512), model)
    engine.run()
    try:
        wide = Structure(StructureKind.REGEX, "(.{1,1000}){1,1000}")
        sampling, counts = SamplingParams(structure=wide, max_new_tokens=110), []
        for _ in range(3):
            stream, count = engine.generate("say it", sampling), 0
            with contextlib.suppress(InvalidRequest):
                async for _ in stream:
                    count += 1
            counts.append(count)
        assert 0 < counts[0] < 110  # it takes too much work
        assert counts == [counts[0]] * 3
    finally:
        await engine.stop()
