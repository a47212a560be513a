"""A model's `generation_config.json` says how requests are drawn that do not say it themselves."""

import json
import logging

import pytest
from counting import collect, counting_engine, model_with
from kserve_requests import infer
from openai_served import CHAT, serving_http
from served import collect as answers_of
from served import request

from jmoe.api import BUNDLED, resolve
from serving.intake.sampling_defaults import sampling_defaults
from serving.proto.inference import inference_pb2_grpc as inference
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import SamplingParams

OWN = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_new_tokens": 7,
}
"""What vLLM reads (`ModelConfig.get_diff_sampling_param`)."""


@pytest.fixture
def directory(tmp_path):
    def write(stored):
        text = stored if isinstance(stored, str) else json.dumps(stored)
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_what_vllm_reads_is_read_and_told(directory, caplog):
    caplog.set_level(logging.INFO)
    others = {"do_sample": False, "eos_token_id": 5, "typical_p": 0.5, "temperature": 0.6}
    found = directory({**OWN, **others})
    assert sampling_defaults(found) == OWN
    (line,) = caplog.messages
    assert line == (
        f"sampling defaults of {found.name}/generation_config.json: temperature 0.6, top_k 20, "
        "top_p 0.95, min_p 0.05, repetition_penalty 1.1, max_new_tokens 7; "
        "--generation-config none turns them off"
    )


@pytest.mark.parametrize("stored", [{}, {"do_sample": True, "top_p": None}])
def test_nothing_is_told_of_a_file_without_defaults(stored, directory, caplog):
    caplog.set_level(logging.INFO)
    assert sampling_defaults(directory(stored)) == {}
    assert not caplog.messages


def test_a_model_without_the_file_has_none(tmp_path):
    assert sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"temperature": -1}, "temperature is -1; it must be between 0 and 100"),
        ({"temperature": "0.6"}, "temperature is '0.6'; it must be between 0 and 100"),
        ({"temperature": True}, "temperature is True; it must be a number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"top_p": 0}, "top_p is 0; it must be in (0, 1]"),
        ({"min_p": [0.1]}, "min_p is [0.1]; it must be in [0, 1]"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number"),
    ],
)
def test_a_wrong_value_is_told_and_the_others_hold(stored, said, directory, caplog):
    (name,) = stored
    rest = {key: value for key, value in OWN.items() if key != name}
    assert sampling_defaults(directory({**OWN, **stored})) == rest
    (warning,) = warnings(caplog)
    assert said in warning
    assert warning.endswith("it is no sampling default")


def test_a_file_that_is_no_json_is_told(directory, caplog):
    assert sampling_defaults(directory("{")) == {}
    assert "is not valid JSON" in warnings(caplog)[0]


def test_the_bundled_model_has_none():
    """So that its answers are what the pages and tests say."""
    assert sampling_defaults(resolve(BUNDLED)) == {}


def test_what_is_given_is_never_replaced():
    neutral = {
        **{"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "max_new_tokens": 100},
    }
    given = SamplingParams.of(neutral)
    assert given.with_defaults(OWN) == given
    for name in OWN:
        left = SamplingParams.of({key: value for key, value in neutral.items() if key != name})
        drawn = left.with_defaults(OWN)
        changed = {key for key in OWN if getattr(drawn, key) != getattr(given, key)}
        assert (changed, getattr(drawn, name)) == ({name}, OWN[name])


def test_who_makes_parameters_in_python_gives_them_all():
    assert SamplingParams().with_defaults(OWN) == SamplingParams()


@pytest.mark.parametrize(
    ("protocols", "wanted"),
    [
        ({"max_new_tokens": None}, (None, 7)),  # as many as fit
        ({"max_new_tokens": None, "default_new_tokens": 16}, (None, 7)),
        ({"max_new_tokens": None, "default_new_tokens": 4}, (None, 4)),
        ({"max_new_tokens": 4}, (4, None)),
        ({}, (7, None)),
    ],
)
def test_most_new_tokens_lower_the_protocols_own_and_never_raise_it(protocols, wanted):
    drawn = SamplingParams.of({}, protocols).with_defaults(OWN)
    assert (drawn.max_new_tokens, drawn.default_new_tokens) == wanted


@pytest.mark.simulated_time
@pytest.mark.parametrize("setting", ["auto", "none"])
async def test_an_engine_draws_by_the_defaults_of_the_model_that_is_asked(setting, directory):
    model = model_with(None)
    model.path = directory({"temperature": 0.6, "max_new_tokens": 2})
    engine = counting_engine(model=model, generation_config=setting)
    admitted, add = [], engine.scheduler.add

    def noted(sequence, now):
        admitted.append(sequence.request.sampling)
        add(sequence, now)

    engine.scheduler.add = noted
    left_out = SamplingParams.of({"max_new_tokens": 3, "ignore_eos": True})
    try:
        for asked in (left_out, SamplingParams(max_new_tokens=3), SamplingParams.of({})):
            await collect(engine, [1, 2], sampling=asked)
    finally:
        await engine.stop()
    is_on = setting == "auto"
    told = [(one.temperature, one.max_new_tokens) for one in admitted]
    assert told == [(0.6 * is_on, 3), (0.0, 3), (0.6 * is_on, 2 if is_on else 128)]


NEUTRAL = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("given", [{}, NEUTRAL, {"top_p": 0.5}], ids=["absent", "all", "one"])
async def test_every_protocol_leaves_out_what_the_request_does(given):
    own = {name: value for name, value in OWN.items() if name != "max_new_tokens"}
    async with serving_http() as s:
        s.engine.defaults = own
        for path, prompt in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": CHAT}),
            ("/v1/responses", {"input": "hi"}),
        ):
            answer = await s.http.post(path, json={"model": "counter", **prompt, **given})
            assert answer.status_code == 200, answer.text
        wanted = {**own, **given}
        said = answer.json()
        assert (said["temperature"], said["top_p"]) == (wanted["temperature"], wanted["top_p"])
        sampling = pb.SamplingParams(**given)
        await answers_of(s.stub.Generate(request([1], sampling=sampling)))
        stub = inference.GRPCInferenceServiceStub(s.channel)
        await stub.ModelInfer(infer("ab", sampling=given))
        await stub.ModelInfer(infer("ab", sampling={"temperature": None, **given}))
        calls = [call["sampling"] for call in s.engine.calls]
    assert len(calls) == 6
    for call in calls:
        found = {name: getattr(call, name) for name in own}
        assert found == pytest.approx(wanted)
