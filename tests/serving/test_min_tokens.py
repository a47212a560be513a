"""`min_new_tokens`: what would end an answer before so many tokens is barred, or ends nothing."""

import numpy as np
import pytest
from shaped import config, texts

import jmoe
from serving.engine import Engine
from serving.errors import InvalidRequest
from serving.intake.structure import _forbid
from serving.request import SamplingParams, Structure, StructureKind

pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")
PROMPT = "Question: what is the capital of Ladrodro? Answer:"


@pytest.fixture(scope="module")
def model():
    return jmoe.load("bundled", "float32")


def ids(output) -> list[int]:
    return [token for out in output for token in out.token_ids]


@pytest.mark.deep
async def test_nothing_ends_an_answer_before_its_least_tokens(model):
    few = {"decode_buckets": (8,), "prefill_buckets": (32,), "policy": "fcfs"}
    engine = await Engine.start(config(**few), model=model)
    eos = set(model.config.eos_token_ids)
    try:
        plain, outputs, why = await texts(engine, PROMPT)
        count = len(ids(outputs))
        assert why == "stop"
        assert ids(outputs)[-1] in eos
        # One token more than it would have: the end comes later, if at all.
        longer, outputs, why = await texts(engine, PROMPT, min_new_tokens=count)
        assert longer.startswith(plain)
        assert len(ids(outputs)) > count
        assert not eos & set(ids(outputs)[:count])
        # No more than it has anyway: the same.
        _, outputs, why = await texts(engine, PROMPT, min_new_tokens=count - 1)
        assert (len(ids(outputs)), why) == (count, "stop")
        _, outputs, why = await texts(engine, PROMPT, min_new_tokens=30, max_new_tokens=30)
        assert (len(ids(outputs)), why) == (30, "length")
        assert not eos & set(ids(outputs))
        # Own stop tokens and stop strings count likewise.
        first = ids(outputs)[0]
        _, outputs, why = await texts(engine, PROMPT, stop_token_ids=(first,), min_new_tokens=3)
        assert first not in ids(outputs)[:3]
        cut, _, why = await texts(engine, PROMPT, stop=(plain[0],))
        assert (cut, why) == ("", "stop")
        kept, outputs, why = await texts(engine, PROMPT, stop=(plain[0],), min_new_tokens=count - 1)
        assert kept.startswith(plain)
        # A structure that is complete ends.
        one = Structure(StructureKind.REGEX, "ab")
        text, _, why = await texts(engine, PROMPT, structure=one, min_new_tokens=20)
        assert (text, why) == ("ab", "stop")
        with pytest.raises(InvalidRequest, match="at least 50 new tokens are asked for, and 40 at"):
            await texts(engine, PROMPT, min_new_tokens=50)
        # What stopped it is in the text where it is to be.
        text, *_ = await texts(engine, PROMPT, stop=(plain[:2],), include_stop=True)
        assert text == plain[:2]
        text, *_ = await texts(engine, PROMPT, stop_token_ids=(first,), include_stop=True)
        assert text
        assert plain.startswith(text)
    finally:
        await engine.stop()


def test_forbidden_tokens_are_cleared_unless_no_other_is_left():
    for allowed, tokens, wanted in (
        ([0, 31, 32, 63], [31, 63, 200], [0, 32]),
        ([5], [5], [5]),
        ([5, 6], [], [5, 6]),
    ):
        row = np.zeros(2, np.int32)
        row.view(np.uint8)[:] = np.packbits(np.isin(np.arange(64), allowed), bitorder="little")
        _forbid(row, frozenset(tokens))
        found = np.unpackbits(row.view(np.uint8), bitorder="little")
        assert np.flatnonzero(found).tolist() == wanted


@pytest.mark.parametrize("least", [-1, 1.5, "2"])
def test_what_is_no_count_is_refused(least):
    with pytest.raises(InvalidRequest, match="min_new_tokens is"):
        SamplingParams(min_new_tokens=least)
