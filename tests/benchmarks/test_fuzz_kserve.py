"""Two thousand fuzzed messages to the Open Inference Protocol."""

import random

from benchmarks.fuzz_kserve import Result, run
from benchmarks.hostile.tensors import fuzzed

from serving.proto.inference import inference_pb2 as pb


async def test_nothing_breaks_the_server() -> None:
    figures, good = await run(2000, seed=11)
    assert good, figures
    assert figures["examples"] == []
    seen = {name.rpartition(" ")[2] for name in figures["codes"]}
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= seen  # messages of every kind are among them


def test_the_same_seed_draws_the_same_messages_of_all_kinds() -> None:
    first, second = ([fuzzed(random.Random(seed)) for seed in range(300)] for _ in range(2))
    assert first == second
    parsed = fine = 0
    for message in first:
        try:
            request = pb.ModelInferRequest.FromString(message)
        except Exception:
            continue
        parsed += 1
        fine += [t.name for t in request.inputs][:1] == ["text_input"]
    assert 100 < fine < parsed < 300


def test_answers_that_must_not_be_are_counted_with_their_messages() -> None:
    result = Result()
    result.add("/x/ModelInfer", ["OK"], [b"a"])
    assert (result.num_messages, result.num_bad, result.examples) == (1, 0, [])
    result.add("/x/ModelStreamInfer", ["OK", "INTERNAL"], [b"a", b"b"], "why")
    assert (result.num_messages, result.num_bad) == (3, 1)
    assert result.examples[0]["messages"] == ["61", "62"]
    assert result.codes["ModelStreamInfer: INTERNAL"] == 1
