"""What a gRPC request asks of its tokens arrives as it was meant, and what comes back does, too."""

import pytest
from served import CODE, collect, failure, request, serving

from serving.config import EngineConfig
from serving.errors import InvalidRequest, TooLong
from serving.frontend import convert
from serving.intake.admission import Admission
from serving.plan import Limits
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.request import Output, Request, SamplingParams, Structure, StructureKind, Usage


async def test_fields_arrive_as_they_are_sent() -> None:
    asked = pb.SamplingParams(
        max_new_tokens=1,
        min_p=0.25,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={7: -100, 9: 2.5},
        top_logprobs=3,
        regex="[0-9]+",
        min_new_tokens=2,
        include_stop=True,
        skip_special_tokens=False,
    )
    async with serving() as setup:
        await collect(setup.stub.Generate(request([1], sampling=asked)))
        (call,) = setup.engine.calls
    sampling: SamplingParams = call["sampling"]
    assert sampling.structure == Structure(StructureKind.REGEX, "[0-9]+")
    assert dict(sampling.logit_bias) == {7: -100.0, 9: 2.5}
    assert (sampling.min_p, sampling.top_logprobs) == (0.25, 3)
    assert (sampling.min_new_tokens, sampling.include_stop) == (2, True)
    assert not sampling.skip_special_tokens
    penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty
    assert penalties == (-1.5, 0.5, 1.25)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_p": 1.5}, "min_p is 1.5; it must be in"),
        ({"presence_penalty": 3}, "presence_penalty is 3.0; it must be between -2 and 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"logit_bias": {3: 101}}, "logit_bias of 3 is 101.0; it must be between -100 and 100"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "number of tokens in logit_bias is 1025"),
        ({"top_logprobs": 21}, "top_logprobs is 21; it must be a whole number up to 20"),
        ({"regex": "a" * 70_000}, "number of characters of a regex is 70000"),
        ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos is set beside a structured"),
    ],
)
async def test_what_is_out_of_range_is_refused_by_name(fields, said) -> None:
    async with serving() as setup:
        call = setup.stub.Generate(request([1], sampling=pb.SamplingParams(**fields)))
        error = await failure(call)
    assert error.code() is CODE.INVALID_ARGUMENT
    assert said in error.details()


def test_likeliest_tokens_go_back_one_list_a_token() -> None:
    top = (((5, -0.1), (6, -2.5)),)
    found = convert.response(Output("id", "x", (5,), (), Usage(1, 1, 0, 0), top_logprobs=top))
    assert [list(one.token_ids) for one in found.top_logprobs] == [[5, 6]]
    assert list(found.top_logprobs[0].logprobs) == pytest.approx([-0.1, -2.5])


@pytest.mark.parametrize(
    ("prompt", "asked", "options", "error", "param"),
    [
        ([1] * 3000, {}, {}, TooLong, "prompt"),
        ([1] * 9, {"max_new_tokens": 3000}, {}, TooLong, "max_new_tokens"),
        ([1] * 9, {"max_new_tokens": 2000}, {}, TooLong, "max_new_tokens"),  # KV pages
        ([1] * 1900, {"max_new_tokens": 1}, {}, TooLong, "prompt"),
        ([], {}, {}, InvalidRequest, "prompt"),
        ([-1], {}, {}, InvalidRequest, "prompt"),
        ([10**400], {}, {}, InvalidRequest, "prompt"),
        ([[1]], {}, {}, InvalidRequest, "prompt"),
        ("text", {}, {}, InvalidRequest, "prompt"),
        (5, {}, {}, InvalidRequest, "prompt"),
        ([1], {"stop": ("a",)}, {}, InvalidRequest, "stop"),
        ([1], {"stop_token_ids": (-1,)}, {}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": ((-1, 1.0),)}, {}, InvalidRequest, "logit_bias"),
        ([1], {"structure": Structure("regex", "a")}, {}, InvalidRequest, "structure"),
        ([1], {}, {"timeout_s": 10**400}, InvalidRequest, "timeout_s"),
        ([1], {}, {"request_id": "a" * 129}, InvalidRequest, "request_id"),
    ],
)
async def test_what_cannot_be_served_is_said_by_its_field(
    prompt, asked, options, error, param
) -> None:
    admission = Admission(EngineConfig(max_model_len=2048), Limits(4, 8, 16, 32, 4), None)
    sampling = SamplingParams(**{"max_new_tokens": 1, **asked})
    fields = {"request_id": "a", "prompt": prompt, "sampling": sampling, **options}
    try:
        with pytest.raises(InvalidRequest) as caught:
            await admission.sequence(Request(**fields), 0.0)
    finally:
        await admission.close()
    assert (type(caught.value), caught.value.param) == (error, param)


async def test_biases_are_of_tokens_that_there_are() -> None:
    admission = Admission(EngineConfig(max_model_len=2048), Limits(4, 8, 16, 32, 4), None)
    try:
        with pytest.raises(InvalidRequest, match="logit_bias has -1, which is no token"):
            admission.check_size(Request("id", [1], SamplingParams(logit_bias=((-1, 1.0),))))
    finally:
        await admission.close()


@pytest.mark.parametrize(
    ("num_tokens", "new", "said"),
    [
        (4, 1000, "has 4 tokens and up to 1000 new ones are asked for: 1004 in all; the context"),
        (600, 1, "has 600 tokens; the context length is 512 (engine.max_model_len), one of them"),
        (600, None, "has 600 tokens; the context length is 512 (engine.max_model_len), one of"),
    ],
)
async def test_what_is_too_long_is_told_in_words_of_every_protocol(num_tokens, new, said) -> None:
    admission = Admission(EngineConfig(max_model_len=512), Limits(4, 32, 16, 32, 4), None)
    request = Request("id", [1] * num_tokens, SamplingParams(max_new_tokens=new))
    try:
        with pytest.raises(TooLong) as caught:
            await admission.sequence(request, 0.0)
        assert said in str(caught.value)
        assert "max_new_tokens" not in str(caught.value)
    finally:
        await admission.close()


@pytest.mark.parametrize(("num_tokens", "fits"), [(400, 16), (506, 6), (511, 1)])
async def test_a_default_number_of_new_tokens_is_cut_to_what_fits(num_tokens, fits) -> None:
    admission = Admission(EngineConfig(max_model_len=512), Limits(4, 32, 16, 32, 4), None)
    sampling = SamplingParams(max_new_tokens=None, default_new_tokens=16)
    try:
        sequence = await admission.sequence(Request("id", [1] * num_tokens, sampling), 0.0)
        assert sequence.max_new_tokens == fits
    finally:
        await admission.close()
