"""`jmoe bench serve --backend openai`: our own HTTP port, and a script of what others send."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from aiohttp import web
from openai_served import serving_http

from serving.bench.config import BenchConfig, prepare
from serving.bench.run import run_bench
from serving.bench.workload import WorkloadError
from serving.errors import Unavailable


@pytest.fixture
async def play(monkeypatch, tmp_path):
    """Plays prompts against a URL from a thread, in this loop; returns the result and each line."""
    loop = asyncio.get_running_loop()

    def run(main):
        return asyncio.run_coroutine_threadsafe(main, loop).result()

    monkeypatch.setattr("serving.bench.run.asyncio", SimpleNamespace(run=run))
    path = tmp_path / "tasks.jsonl"

    async def played(url, *prompts, answer="xyz", **changes):
        rows = [{"family": "f", "prompt": prompt, "answer": answer} for prompt in prompts]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = {"dataset_name": "tasks", "dataset_path": path} if prompts else {}
        config = BenchConfig(
            backend="openai", base_url=url, save_detailed=True, result_dir=tmp_path,
            **{"num_prompts": len(prompts), **dataset, **changes},
        )  # fmt: skip
        said = []
        return await asyncio.to_thread(run_bench, config, said.append), said

    return played


class Other:
    """A server that answers as it is told: events of each answer in turn, or a status."""

    def __init__(self, *answers, models=({"id": "other", "max_model_len": 64},)):
        # The first request asks whether prompts are taken.
        self.answers, self.models, self.asked = [[chunk("!"), DONE], *answers], models, []
        self.health = []  # statuses before 200

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_post("/v1/completions", self._complete)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def _models(self, request):
        return web.json_response({"data": list(self.models)})

    async def _health(self, request):
        return web.Response(status=self.health.pop(0) if self.health else 200)

    async def _complete(self, request):
        self.asked.append((await request.json(), request.headers.get("Authorization")))
        answer = self.answers.pop(0)
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "no room"}}, status=answer)
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        for event in answer:
            text = event if isinstance(event, str) else json.dumps(event)
            await stream.write(f"data: {text}\n\n".encode())
        return stream


def chunk(text, reason=None):
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}


DONE = chunk("", "stop")


def usage(completion):
    return {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": completion, "total_tokens": 0},
    }


async def test_our_own_http_port(play):
    async with serving_http() as s:
        result, said = await play(str(s.http.base_url).rstrip("/"), "ab", "d", answer="cde")
        first, *calls = s.engine.calls
    assert result["completed"] == 2
    assert sorted(result["generated_texts"]) == ["cdef", "efgh"]
    assert result["output_lens"] == [4, 4]
    assert sorted(result["input_lens"]) == [1, 2]
    assert result["model_id"] == "counter"
    assert [len(gaps) for gaps in result["itls"]] == [3, 3]
    assert first["sampling"].max_new_tokens == 1
    assert all(call["sampling"].temperature == 0 for call in calls)
    assert said[0].startswith("2 requests:")


async def test_random_prompts_are_token_ids_of_the_tokenizer(play, tmp_path):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({f"t{i}": i for i in range(9)}, unk_token="t0")).save(str(path))
    async with serving_http() as s:
        url = str(s.http.base_url).rstrip("/")
        shape = {"num_prompts": 4, "random_input_len": 8, "random_output_len": 6}
        result, _ = await play(url, tokenizer=path, **shape)
        drawn = [token for call in s.engine.calls for token in call["prompt"]]
        with pytest.raises(WorkloadError, match="how many it knows: name the model's --tokenizer"):
            await play(url, **shape)
    assert result["output_lens"] == [6] * 4
    assert max(drawn) < 9


async def test_tokens_without_text_are_counted_and_failures_are_told_apart(play, monkeypatch):
    monkeypatch.setenv("JMOE_API_KEY", "secret")
    answers = [
        [chunk("x"), "[DONE]"],  # no reason why it ended
        [chunk("xy"), chunk("z", "length"), usage(4), "[DONE]"],
        429,
        [chunk("x"), {"error": {"message": "out of pages"}}],
        [chunk("x"), "{"],
        [chunk("xyz"), DONE],  # without usage: what was seen
    ]
    async with Other(*answers) as other:
        result, said = await play(other.url, *"abcdef", max_concurrency=1)
    assert (result["completed"], result["failed"]) == (2, 4)
    assert result["failures"] == {"INTERNAL": 3, "RESOURCE_EXHAUSTED": 1}
    assert result["total_output_tokens"] == 4 + 1
    assert result["accuracy"] == 1
    assert "HTTP 429" in next(line for line in said if "RESOURCE_EXHAUSTED" in line)
    errors = " ".join(result["errors"])
    assert "without a finish_reason" in errors
    assert "out of pages" in errors
    assert "no JSON" in errors
    body, key = other.asked[-1]
    assert key == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("other", 4, 0)
    assert "ignore_eos" not in body


async def test_an_event_whose_text_is_held_back_is_a_token(play):
    answers = [[chunk("x"), chunk(""), chunk(""), chunk("yz"), DONE, usage(4), "[DONE]"]] * 2
    async with Other(*answers) as other:
        result, _ = await play(other.url, "a")
    assert result["output_lens"] == [4]
    assert [len(gaps) for gaps in result["itls"]] == [3]


async def test_a_server_that_cannot_be_measured_is_named(play):
    async with Other(models=()) as other:
        with pytest.raises(ConnectionError, match="no server of OpenAI's completions"):
            await play(other.url, "a")
    with pytest.raises(ConnectionError, match=r"no server answers at http://127\.0\.0\.1"):
        await play(other.url, "a")
    async with Other() as other:
        other.answers = [400]
        with pytest.raises(WorkloadError, match="does not take the dataset's texts: HTTP 400"):
            await play(other.url, "a")
        with pytest.raises(WorkloadError, match=r"--model is this; .* serves other"):
            await play(other.url, "a", model="this")


async def test_a_server_that_starts_is_waited_for(play):
    async with Other([chunk("xyz"), DONE]) as other:
        other.health = [503, 503]
        result, said = await play(other.url, "a")
        assert said[0] == f"waiting for {other.url}, which is starting"
        other.health = [503] * 9
        with pytest.raises(Unavailable, match="is not ready, but starting"):
            await play(other.url, "a", ready_check_timeout_sec=0)
    assert result["completed"] == 1


async def test_warm_ups_and_sampling_reach_the_server_and_only_the_rest_counts(play):
    answers = [[chunk("w"), DONE]] * 2 + [[chunk("x"), DONE]] * 3
    async with Other(*answers) as other:
        result, _ = await play(
            other.url, "a", num_prompts=3, num_warmups=2, ignore_eos=True,
            temperature=0.5, max_concurrency=1, disable_tqdm=True,
        )  # fmt: skip
    assert result["completed"] == 3
    assert set(result["generated_texts"]) == {"x"}
    asked = [body for body, _ in other.asked[1:]]  # the first asks whether texts are taken
    assert [(body["temperature"], body["ignore_eos"]) for body in asked] == [(0.5, True)] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"best_effort_share": 0.5}, "--best-effort-share needs --backend jmoe"),
        ({"admin_address": "h:1"}, "--admin-address needs --backend jmoe"),
        ({"base_url": "grpc://h:1"}, "write http://HOST:PORT, or https"),
    ],
)
def test_what_openai_has_not_is_refused(change, message):
    with pytest.raises(WorkloadError, match=message):
        prepare(BenchConfig(backend="openai", **change))


@pytest.mark.parametrize(
    ("change", "address"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "::1", "port": 7}, "http://[::1]:7"),
        ({"base_url": "https://name:8000/"}, "https://name:8000"),
    ],
)
def test_address_of_http(change, address):
    for backend in ("openai", "vllm"):
        assert prepare(BenchConfig(backend=backend, **change)).address == address
