"""`jmoe bench serve`: what is checked before a connection, its table and its JSON."""

import asyncio
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import scripted_server

from serving.bench.config import BenchConfig, prepare
from serving.bench.run import run_bench
from serving.bench.table import WIDTH, result_table
from serving.bench.workload import WorkloadError
from serving.cli import main as cli

NOBODY = "127.0.0.1:1"


@pytest.fixture
async def served():
    server, servicer, address = await scripted_server.start()
    yield servicer, address
    await server.stop(None)


@pytest.fixture
async def one_loop(monkeypatch):
    """Runs the benchmark in the server's event loop: in one process, gRPC wants no second."""
    loop = asyncio.get_running_loop()

    def run(main):
        return asyncio.run_coroutine_threadsafe(main, loop).result()

    monkeypatch.setattr("serving.bench.run.asyncio", SimpleNamespace(run=run))


@pytest.fixture
def jmoe(one_loop, monkeypatch, capsys):
    """Runs the command line in a thread; returns its status, stdout and stderr."""

    def main(arguments):
        monkeypatch.setattr(sys, "argv", ["jmoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0

    async def run(*arguments):
        status = await asyncio.to_thread(main, arguments)
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return run


def tasks_file(tmp_path, *scripts):
    path = tmp_path / "tasks.jsonl"
    rows = [{"family": "f", "prompt": s, "answer": "x" * len(s.split(","))} for s in scripts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def figures(table):
    """Returns labels and values of a table, whose rules have no colon."""
    rows = (line.rsplit(None, 1) for line in table.splitlines() if ": " in line)
    return {label.strip(" :"): value for label, value in rows}


# -- the command line, over a socket -------------------------------------------------------------


async def test_the_table_is_that_of_vllm_and_ours(served, jmoe, tmp_path):
    servicer, address = served
    servicer.state.decode_threshold_percent = 40
    path = tasks_file(tmp_path, "1,1")
    dataset = ["--dataset-name", "tasks", "--dataset-path", path, "--num-prompts", "6"]
    slos = ["--goodput", "ttft:60000", "tpot:0", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    status, out, err = await jmoe(
        "bench", "serve", "--base-url", f"http://{address}", "--backend", "jmoe",
        "--model", "scripted", *dataset, *slos, "--metric-percentiles", "50,99.9",
    )  # fmt: skip
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert {len(line) for line in lines} == {WIDTH}
    for title in ("Time to First Token", "Inter-token Latency", "End-to-end Latency", "Brownout"):
        assert any(re.fullmatch(rf"-+{title}-+", line) for line in lines)
    found = figures(out)
    assert found["Successful requests"] == "6"
    assert found["Total generated tokens"] == "12"
    assert found["Request goodput (req/s)"] == "0.00"  # no gap is that short
    assert re.fullmatch(r"\d+\.\d\d", found["P99.9 E2EL (ms)"])
    assert found["Degraded expert visits (%)"] == "50.00"
    assert found["Decode threshold seen (%)"] == "40"
    assert found["Late first tokens, prefill (%)"] == "0.00"
    assert found["Late other tokens, decode (%)"] == "100.00"
    assert found["Right answers (%)"] == "100.00"
    assert not re.search(r"\d\.\d{3}|None|nan|inf\b", out)
    assert "6 requests: " in err
    assert "requests: 6 of 6" in err
    assert {r.model for r in servicer.requests[1:]} == {"scripted"}


async def test_requests_go_to_models_and_figures_are_by_model(served, jmoe, tmp_path):
    servicer, address = served
    servicer.info.models.extend(["scripted", "tuned", "other"])
    flags = ["--base-url", f"http://{address}", "--num-prompts", "12"]
    dataset = ["--dataset-name", "tasks", "--dataset-path", tasks_file(tmp_path, "1,1")]
    mix = ["--model-mix", "tuned=1", "scripted=2", "--save-result", "--result-dir", tmp_path]
    status, out, err = await jmoe("bench", "serve", *flags, *dataset, *mix)
    assert status == 0
    asked = Counter(r.model for r in servicer.requests[1:])
    assert set(asked) == {"tuned", "scripted"}
    assert f"{asked['tuned']} to tuned, {asked['scripted']} to scripted" in err
    (path,) = tmp_path.glob("jmoe-*.json")
    result = json.loads(path.read_text())
    assert result["model_mix"] == {"tuned": 1, "scripted": 2}
    assert {name: m["completed"] for name, m in result["models"].items()} == asked
    assert sum(m["output_throughput"] for m in result["models"].values()) == pytest.approx(
        result["output_throughput"]
    )
    for name in asked:
        assert re.search(rf"^-+Model {name}-+$", out, re.M)
    status, _, _ = await jmoe("bench", "serve", *flags, *dataset, "--model", "tuned")
    assert status == 0
    assert {r.model for r in servicer.requests[14:]} == {"tuned"}


async def test_what_was_not_measured_is_no_figure(served, jmoe, tmp_path):
    """Answers of one token have no time between tokens, of a class no more than of all."""
    flags = ["--base-url", f"http://{served[1]}", "--num-prompts", "12"]
    dataset = ["--dataset-name", "tasks", "--dataset-path", tasks_file(tmp_path, "1")]
    save = ["--save-result", "--result-dir", tmp_path]
    status, out, _ = await jmoe(
        "bench", "serve", *flags, *dataset, *save, "--best-effort-share", "0.5"
    )
    assert status == 0
    (path,) = tmp_path.glob("jmoe-*.json")
    result = json.loads(path.read_text())
    for figures_of in (result, *result["classes"].values()):
        assert figures_of["completed"] > 0
        assert figures_of["mean_tpot_ms"] is figures_of["p99_itl_ms"] is None
        assert figures_of["mean_ttft_ms"] > 0
    assert len(re.findall(r"^Mean TPOT \(ms\): +-$", out, re.M)) == 3


async def test_the_command_by_itself(served):
    _, address = served
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "serving.cli", "bench", "serve", "--base-url", f"http://{address}"),
        *("--num-prompts", "2"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await child.communicate()
    assert child.returncode == 0, err
    assert figures(out.decode())["Successful requests"] == "2"


async def test_defaults_fit_the_server(served, jmoe):
    servicer, address = served
    servicer.info.max_queue_len = 8
    status, out, err = await jmoe("bench", "serve", "--base-url", f"grpc://{address}")
    assert status == 0
    assert len(servicer.requests) == 12  # what runs and what may wait
    assert {len(r.tokens.ids) for r in servicer.requests} == {57}
    assert {r.sampling.max_new_tokens for r in servicer.requests} == {7}
    assert max(token for r in servicer.requests for token in r.tokens.ids) < 50
    assert err.splitlines()[0] == (
        "12 requests: 57 random tokens in, 7 out (max_model_len 64); the server takes no more at "
        "once than 4 running and 8 waiting"
    )
    found = figures(out)  # the script of a token prompt is empty: no tokens, no gaps
    assert found["Mean TPOT (ms)"] == found["P99 ITL (ms)"] == "-"
    assert found["Request goodput (req/s)"] == "-"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--random-input-len", "70"], "--random-input-len 70 makes at least 71 tokens a request"),
        (["--random-output-len", "64"], "the server's max_model_len is 64"),
        (["--random-input-len", "40", "--random-output-len", "30"], "make at least 70 tokens"),
        (["--num-prompts", "13"], "--num-prompts is 13, all at once; the server takes 12"),
        (["--max-concurrency", "13", "--num-prompts", "99"], "--max-concurrency is 13"),
        (["--model", "other"], "--model is other; .* serves scripted"),
        (["--model-mix", "other=1"], "--model-mix has other; .* serves scripted"),
    ],
)
async def test_a_flag_that_does_not_fit_is_an_error(served, jmoe, flags, message):
    servicer, address = served
    servicer.info.max_queue_len = 8
    status, out, err = await jmoe("bench", "serve", "--base-url", f"http://{address}", *flags)
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"jmoe: .*{message}.*\n", err)
    assert not servicer.requests


async def test_nobody_listens(jmoe):
    status, out, err = await jmoe("bench", "serve", "--port", "1")
    assert (status, out) == (2, "")
    assert err.startswith(f"jmoe: no server answers at {NOBODY} (Connection refused")
    assert "`jmoe serve`" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "message"),
    [("draining", "is not ready, but draining"), ("starting", "--ready-check-timeout-sec")],
)
async def test_a_server_that_does_not_get_ready(served, jmoe, status, message):
    servicer, address = served
    servicer.info.status = status
    await servicer.health.set("", scripted_server.NOT_SERVING)
    code, _, err = await jmoe(
        "bench", "serve", "--base-url", f"http://{address}", "--ready-check-timeout-sec", "0.2"
    )
    assert code == 2
    assert message in err.splitlines()[-1]


async def test_a_server_without_a_tokenizer_is_told_before_the_run(served, jmoe, tmp_path):
    servicer, address = served
    servicer.takes_text = False
    dataset = ["--dataset-name", "tasks", "--dataset-path", tasks_file(tmp_path, "1,1")]
    code, _, err = await jmoe("bench", "serve", "--base-url", f"http://{address}", *dataset)
    assert code == 2
    assert "no tokenizer here (--dataset-name random needs no tokenizer)" in err
    assert len(servicer.requests) == 1


async def test_failures_are_counted_and_explained(served, jmoe, tmp_path):
    _, address = served
    dataset = ["--dataset-name", "tasks", "--dataset-path", tasks_file(tmp_path, "refuse")]
    flags = ["--base-url", f"http://{address}", "--num-prompts", "3", *dataset]
    code, out, err = await jmoe("bench", "serve", *flags)
    assert code == 1
    assert "3 failed with RESOURCE_EXHAUSTED: queue is full" in err
    assert err.splitlines()[-1] == "jmoe: no request was answered"
    found = figures(out)
    assert (found["Failed requests"], found["RESOURCE_EXHAUSTED"]) == ("3", "3")
    assert found["Mean TTFT (ms)"] == found["Degraded expert visits (%)"] == "-"


async def test_bench_writes_what_it_returns(served, one_loop, tmp_path):
    servicer, address = served
    result = await asyncio.to_thread(
        run_bench,
        BenchConfig(
            port=int(address.rpartition(":")[2]),
            dataset_name="tasks",
            dataset_path=tasks_file(tmp_path, "5,5"),
            num_prompts=10,
            request_rate=100.0,
            burstiness=2.5,
            goodput=("ttft:60000",),
            save_detailed=True,
            result_dir=tmp_path,
            result_filename="result.json",
        ),
    )
    assert (result["completed"], result["accuracy"]) == (10, 1.0)
    assert len(servicer.requests) == 11  # one to see that the server takes text
    assert result["request_goodput"] == result["request_throughput"]
    assert result["output_lens"] == [2] * 10
    assert (result["burstiness"], result["num_prompts"]) == (2.5, 10)
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert "p99_ttft_ms" in result
    assert "mean_e2el_ms" not in result  # as vLLM's default has it


# -- before a connection -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "tgi"], "--backend is tgi; known: jmoe (gRPC) and openai, also called vllm"),
        (["--random-range-ratio", "1"], "--random-range-ratio is 1.0; it must be 0 or more, below"),
        (["--random-range-ratio", ".1", "--dataset-name", "tasks"], "is of --dataset-name random"),
        (["--temperature", "-1"], "--temperature is -1.0; it must be at least 0"),
        (["--num-warmups", "-1"], "--num-warmups is -1; it must be at least 0"),
        (["--base-url", "https://h"], "https://HOST:PORT where the server has a certificate"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is empty"),
        (["--tls-cert", "own.pem"], "tls_cert and tls_key of a client go together"),
        (["--base-url", "localhost:50051"], "write http://HOST:PORT or grpc://HOST:PORT"),
        (["--base-url", "http://localhost"], "write http://HOST:PORT"),
        (["--base-url", "http://h:1/v1"], "write http://HOST:PORT"),
        (["--base-url", "http://h:99999"], "Port out of range"),
        (["--port", "0"], "--port is 0"),
        (["--dataset-name", "sharegtp"], "known: sharegpt, alpaca, tasks, random"),
        (["--dataset-name", "sharegpt", "--dataset-path", "none.json"], "none.json"),
        (["--dataset-path", "x.json"], "--dataset-name random reads none"),
        (["--percentile-metrics", "ttft,speed"], "has speed; known: ttft, tpot, itl, e2el"),
        (["--goodput", "ttft:200", "itl:3"], "--goodput knows ttft, tpot and e2el, not 'itl'"),
        (["--goodput", "ttft:soon"], "METRIC:MILLISECONDS"),
        (["--goodput", "ttft:-1"], "must be at least 0"),
        (["--metric-percentiles", "50,101"], "has 101; they are from 0 to 100"),
        (["--metric-percentiles", "abc"], "'abc' is not numbers"),
        (["--save-result", "--result-dir", "/proc/x"], "results cannot go to /proc/x"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--model-mix", "a"], "--model-mix 'a' is not NAME=WEIGHT, such as a=1"),
        (["--model-mix", "a=1", "b=0"], "'b=0': a weight is a number above 0, such as b=1"),
        (["--model-mix", "a=some"], "'a=some': a weight is a number above 0"),
        (["--model-mix", "a=inf"], "'a=inf': a weight is a number above 0"),
        (["--model-mix", "a=1", "a=2"], "--model-mix names a twice"),
        (["--model-mix", "a=1", "--model", "a"], "give --model or --model-mix, not both"),
        (["--random-input-len", "0"], "--random-input-len is 0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--time-limit-s", "0"], "--time-limit-s is 0.0"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--burstiness", "0"], "--burstiness is 0.0; it must be above 0"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "steep"], "known: linear, exponential"),
        (["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2"], "they are 2.0 and None"),
        (["--ramp-up-strategy", "linear", "--request-rate", "2"], "not both"),
    ],
)
async def test_settings_are_checked_before_a_connection(jmoe, flags, message):
    where = [] if "--base-url" in flags or "--port" in flags else ["--port", "1"]
    status, out, err = await jmoe("bench", "serve", *where, *flags)
    assert (status, out) == (2, "")
    assert err.startswith("jmoe: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "address"),
    [
        ({}, "127.0.0.1:50051"),
        ({"host": "::1", "port": 7}, "[::1]:7"),
        ({"base_url": "http://name:8000/", "port": 7}, "name:8000"),
        ({"base_url": "grpc://[::1]:8000"}, "[::1]:8000"),
    ],
)
def test_address(change, address):
    assert prepare(BenchConfig(**change)).address == address


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "ttft:200", "tpot:50", "--seed", "3"],
        ["--seed", "3", "--goodput", "ttft:200", "--goodput", "tpot:50"],
        ["--goodput=ttft:200", "--seed", "3", "--goodput=tpot:50"],
    ],
)
async def test_goodput_takes_several_values(monkeypatch, jmoe, flags):
    seen = []

    def stop(config, *_):
        seen.append(config)
        raise WorkloadError("seen")

    monkeypatch.setattr("serving.bench.run.run_bench", stop)
    await jmoe("bench", "serve", *flags)
    assert [(config.goodput, config.seed) for config in seen] == [(("ttft:200", "tpot:50"), 3)]
    await jmoe("bench", "serve", *flags, "--model-mix", "a=1", "b=2")
    assert [config.model_mix for config in seen] == [(), ("a=1", "b=2")]


# -- what is shown -------------------------------------------------------------------------------


def test_table_of_the_least_there_is():
    result = {
        **dict.fromkeys(("request_goodput", "accuracy", "degraded_share", "max_concurrency")),
        **dict.fromkeys(("prefill_threshold_percent", "decode_threshold_percent")),
        **{"completed": 0, "failed": 0, "failures": {}, "duration": 1 / 3, "request_rate": 2.0},
        **dict.fromkeys(("total_input_tokens", "total_output_tokens"), 0),
        **dict.fromkeys(("request_throughput", "output_throughput"), 0.0),
        **{"total_token_throughput": 12345.678, "latest_send_ms": 0.5, "client_cpu_share": 0.25},
    }
    found = figures(result_table(result))
    assert found["Total token throughput (tok/s)"] == "12345.68"
    assert found["Benchmark duration (s)"] == "0.33"
    assert found["Request rate configured (RPS)"] == "2.00"
    assert found["Degraded expert visits (%)"] == "-"
    assert found["Busy share of one core (%)"] == "25.00"
