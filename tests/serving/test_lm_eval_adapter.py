"""Scores through a real socket, from a server whose every log-probability is known by hand.

Its tokens are characters. Token `c` has log-probability `-ord(c) / 100` whatever stands before it,
and greedy decoding spells on through the alphabet: after "b" comes "c".
"""

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from serving.bench import lm_eval_adapter
from serving.bench.lm_eval_adapter import sampling_of
from serving.bench.scorer import PromptTooLong, Scorer, halves
from serving.proto.jmoe.v1 import jmoe_pb2 as pb
from serving.proto.jmoe.v1 import jmoe_pb2_grpc as rpc

MAX_LEN = 32


def logprob(text):
    return -sum(map(ord, text)) / 100


class Alphabet(rpc.GenerationServicer, rpc.AdminServicer):
    def __init__(self):
        self.requests, self.refusals = [], 0

    def Generate(self, request, context):
        self.requests.append(request)
        if self.refusals:
            self.refusals -= 1
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "5"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        text, sampling = request.text, request.sampling
        if text == "!":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not like this")
        if len(text) + sampling.max_new_tokens > MAX_LEN:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "too long")
        out = "".join(chr(ord(text[-1]) + 1 + i) for i in range(sampling.max_new_tokens))
        for stop in sampling.stop:
            out = out.split(stop)[0]
        given = [logprob(c) for c in text[1:]] if sampling.prompt_logprobs else []
        for i, char in enumerate(out):
            yield pb.GenerateResponse(text=char, prompt_logprobs=[] if i else given)
        usage = pb.Usage(prompt_tokens=len(text), expert_visits=10, degraded_visits=1)
        yield pb.GenerateResponse(usage=usage, finish_reason="length")

    def GetServerInfo(self, request, context):
        return pb.ServerInfo(model="alphabet", max_num_seqs=4, max_model_len=MAX_LEN)

    def GetBrownout(self, request, context):
        return pb.BrownoutState(strategy="partial", way=8, decode_threshold_percent=40)


@pytest.fixture
def alphabet():
    """Yields the servicer; its `scorer` makes a client of it."""
    servicer, server = Alphabet(), grpc.server(ThreadPoolExecutor(8))
    rpc.add_GenerationServicer_to_server(servicer, server)
    rpc.add_AdminServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    made = []

    def scorer(**fields):
        made.append(Scorer(servicer.address, **fields))
        return made[-1]

    servicer.scorer = scorer
    yield servicer
    for one in made:
        one.close()
    server.stop(None).wait()


def test_loglikelihoods_by_hand(alphabet):
    pairs = [("xab", "cd"), ("xab", "cx"), ("xab", "q"), ("ta", "b"), ("xab", "")]
    done = []
    found = alphabet.scorer().loglikelihood(pairs, lambda: done.append(1))
    assert [greedy for _, greedy in found] == [True, False, False, True, True]
    for (total, _), (_, text) in zip(found, pairs, strict=True):
        assert total == pytest.approx(logprob(text), abs=1e-5)
    assert len(done) == 5


def test_only_hopeful_continuations_are_decoded(alphabet):
    alphabet.scorer().loglikelihood([("ab", c) for c in ("cd", "xy", "zz")])
    greedy = [r for r in alphabet.requests if r.sampling.ignore_eos]
    assert [(r.text, r.sampling.max_new_tokens) for r in greedy] == [("ab", 2)]
    counted = [r for r in alphabet.requests if not r.sampling.prompt_logprobs]
    assert len(counted) == 2  # the context's length once for all three


def test_spaces_before_a_continuation_belong_to_it(alphabet):
    ((total, greedy),) = alphabet.scorer().loglikelihood([("ab ", "cd")])
    assert total == pytest.approx(logprob(" cd"), abs=1e-5)
    assert not greedy  # "cde" it would have been


def test_a_text_without_context_follows_the_prefix(alphabet):
    scorer = alphabet.scorer(prefix="@")
    ((total, greedy),) = scorer.loglikelihood([("", "AB")])
    assert total == pytest.approx(logprob("AB"), abs=1e-5)
    assert greedy  # "@" is the character before "A"
    with pytest.raises(ValueError, match=r"prefix=<\|endoftext\|>"):
        alphabet.scorer().loglikelihood([("", "AB")])


def test_a_long_context_loses_its_beginning(alphabet, caplog):
    context = "q" * 60 + "xyab"
    ((total, greedy),) = alphabet.scorer().loglikelihood([(context, "cd")])
    assert total == pytest.approx(logprob("cd"), abs=1e-5)
    assert greedy
    assert caplog.text.count("loses its beginning") == 1
    used = {r.text for r in alphabet.requests if len(r.text) <= MAX_LEN - 2}
    assert all(context.endswith(text.removesuffix("cd")) for text in used)
    with pytest.raises(PromptTooLong, match="longer than 32 tokens"):
        alphabet.scorer().loglikelihood([("a", "b" * 60)])


def test_rolling_counts_every_token_once_after_the_prefix(alphabet):
    long = "the quick brown fox jumps over the lazy dog " * 3
    scorer = alphabet.scorer(prefix="@@")
    short, pieces = scorer.loglikelihood_rolling(["abc", long])
    assert short == pytest.approx(logprob("abc"), abs=1e-4)
    assert pieces == pytest.approx(logprob(long), abs=1e-4)
    with pytest.raises(ValueError, match="prefix"):
        alphabet.scorer().loglikelihood_rolling(["abc"])


def test_halves():
    assert halves("the quick brown") == ("the quick", " brown")
    assert halves("abcd") == ("ab", "cd")
    assert "".join(halves("a  b")) == "a  b"
    with pytest.raises(PromptTooLong):
        halves("a")


def test_generation_stops_and_fits(alphabet, caplog):
    requests = [
        ("a", {"max_new_tokens": 5, "stop": ["e", "zz"]}),
        ("xa", {"max_new_tokens": 3, "stop": []}),
        ("x" * 27 + "a", {"max_new_tokens": 20, "stop": []}),
    ]
    assert alphabet.scorer().generate_until(requests) == ["bcd", "bcd", "bcde"]
    assert "20 new tokens do not fit" in caplog.text


def test_results_keep_their_order_and_visits_are_summed(alphabet):
    scorer = alphabet.scorer(concurrency=8, allow_brownout=False)
    requests = [(chr(97 + i), {"max_new_tokens": 1, "stop": []}) for i in range(20)]
    assert scorer.generate_until(requests) == [chr(98 + i) for i in range(20)]
    assert (scorer.expert_visits, scorer.degraded_visits) == (200, 20)
    assert not any(r.allow_brownout for r in alphabet.requests)


def test_a_busy_server_is_asked_again_and_a_refusal_is_told(alphabet):
    alphabet.refusals = 3
    assert alphabet.scorer().generate_until([("a", {"max_new_tokens": 1})]) == ["b"]
    with pytest.raises(grpc.RpcError, match="not like this"):
        alphabet.scorer().generate_until([("!", {"max_new_tokens": 1})])
    alphabet.refusals = 1000
    with pytest.raises(grpc.RpcError, match="busy"):
        alphabet.scorer(timeout_s=0.1).generate_until([("a", {"max_new_tokens": 1})])


def test_no_server_is_one_clear_error(monkeypatch):
    monkeypatch.setattr("serving.bench.scorer._CONNECT_S", 0.2)
    with pytest.raises(ConnectionError, match=r"no jmoe server answers at 127.0.0.1:1"):
        Scorer("127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, {"stop": [], "max_new_tokens": 256}),
        (
            {"until": "\n", "max_gen_toks": 9, "do_sample": False, "temperature": 0.7},
            {"stop": ["\n"], "max_new_tokens": 9},
        ),
        (
            {"until": ["a", ""], "do_sample": True, "top_p": 0.5, "top_k": 3, "seed": 1},
            {
                "stop": ["a"],
                "max_new_tokens": 256,
                "temperature": 1.0,
                "top_p": 0.5,
                "top_k": 3,
                "seed": 1,
            },
        ),
        (
            {"temperature": 0.3, "max_tokens": 4},
            {"stop": [], "max_new_tokens": 4, "temperature": 0.3},
        ),
        ({"temperature": 0.0, "top_p": 0.9}, {"stop": [], "max_new_tokens": 256}),
    ],
)
def test_options_of_the_harness(options, want):
    assert sampling_of(options) == want
    pb.SamplingParams(**want)


def test_options_that_the_server_lacks_are_refused():
    with pytest.raises(ValueError, match="no generation option num_beams, repetition_penalty"):
        sampling_of({"repetition_penalty": 1.2, "num_beams": 4})


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    for name in ("lm_eval", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as caught:
        lm_eval_adapter.main()
    assert caught.value.code == 2
    assert "install lm-eval" in capsys.readouterr().err


def test_through_the_harness(alphabet, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval", reason="lm_eval has an environment of its own")
    lm_eval_adapter.register()
    docs = [
        {"q": "ab", "choices": ["xx", "cd"], "gold": 1},
        {"q": "k", "choices": ["l"], "gold": 0},
    ]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    config = {
        "task": "letters",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval.simple_evaluate(
        model="jmoe",
        model_args=f"address={alphabet.address}",
        tasks=[config],
        log_samples=True,
    )
    samples = found["samples"]["letters"]
    scores = [total for sample in samples for ((total, _),) in sample["resps"]]
    assert scores == pytest.approx([logprob(t) for t in ("xx", "cd", "l")], abs=1e-5)
    assert found["config"]["brownout_way"] == 8
    assert not math.isnan(found["results"]["letters"]["acc,none"])
