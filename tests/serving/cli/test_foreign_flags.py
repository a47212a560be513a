"""Unknown flags: vLLM's and SGLang's get jmoe's way, others a hint only if one is really close."""

import re
import sys

import pytest

from serving.cli import main as cli
from serving.cli.foreign_flags import ADVICE, ALIASES
from serving.cli.options import flag_keys
from serving.settings import reading


def error_of(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["jmoe", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--enforce-eager"], "--enforce-eager; use --set engine.enforce_eager=true"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size; jmoe splits no matrix"),
        (["--tensor_parallel_size=2"], "use --mesh ep=N"),
        (["-tp", "2"], "-tp; jmoe splits no matrix over devices; use --mesh ep=N"),
        (["--api-key=secret"], "--api-key; use `jmoe keys new NAME --file FILE`"),
        (["--enable-prefix-caching"], "it is always on"),
        (["-O3"], "-O3; use --set engine.decode_buckets"),
        (["--language-model-only"], "it is always so: jmoe serves text only"),
        (["--uds", "/tmp/x"], "--host HOST and --http-port PORT"),
        (["--max-model-len", "1.5k", "--dtype", "half", "--uds", "x"], "No such option: --uds"),
        (["--max-model-len", "many"], "Invalid value for '--max-model-len'"),
        (["--log-level", "info"], "--log-level; use --verbose, which logs every request"),
        (["--max-logprobs", "20"], "--max-logprobs; it is always 20; --set engine.max_logprobs"),
        (["--pge-size", "8"], "--pge-size; did you mean --page-size?"),
    ],
)
def test_a_foreign_or_misspelt_flag_says_what_to_do(
    arguments: list[str], said: str, monkeypatch, capsys
) -> None:
    message = error_of(monkeypatch, capsys, "serve", "DIR", *arguments)
    assert said in message
    assert "secret" not in message


@pytest.mark.parametrize("command", [["serve"], ["bench", "serve"], ["generate"], ["info"]])
@pytest.mark.parametrize("flag", ["--frobnicate", "--tokens-per-size", "--key", "--load-size"])
def test_a_flag_that_is_like_none_gets_no_hint(
    command: list[str], flag: str, monkeypatch, capsys
) -> None:
    assert error_of(monkeypatch, capsys, *command, flag, "1") == f"Error: No such option: {flag}"


def test_what_the_table_names_is_there() -> None:
    flags = {"--" + name.replace("_", "-") for name in flag_keys()} | {"--model", "--verbose"}
    for said in ADVICE.values():
        assert not re.match(r"--[^ ,]+ ([^ ,]+ )?[a-z]+s\b", said), f"use {said}"
        named = set(re.findall(r"--[a-z][a-z-]+", said)) - {"--set", "--file"}
        assert named <= flags
        for key, value in re.findall(r"--set ([\w.]+)=(\w+(?:,\d+)*)", said):
            given = {key: "1" if value == "N" else value, "engine.mesh": "ep=2"}
            given |= {"engine.mesh": ""} if "hybrid" in key else {}  # operating.md: not together
            given |= {key: "http://127.0.0.1:4318/v1/traces"} if value == "URL" else {}
            reading.load(overrides=given)
    assert set(ALIASES) <= flags
    assert not flags & set(ADVICE)
    assert not {alias for names in ALIASES.values() for alias in names} & {*flags, *ADVICE}


def test_aliases_set_what_jmoes_flags_set(monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("serving.startup.prepare.check_start", lambda engine: None)
    monkeypatch.setattr(cli, "_lead", seen.append)
    given = ["--block-size", "32", "--gpu-memory-utilization=0.8", "--max-running-requests", "5"]
    monkeypatch.setattr(sys, "argv", ["jmoe", "serve", *given])
    with pytest.raises(SystemExit):
        cli.main()
    engine = seen[0].engine
    assert (engine.page_size, engine.memory_fraction, engine.max_num_seqs) == (32, 0.8, 5)


@pytest.mark.parametrize(
    ("given", "dtype", "length", "generation"),
    [
        (["--dtype", "auto", "--max-model-len", "auto"], "bfloat16", 0, "auto"),
        (["--dtype=half", "--max_model_len=1.5k"], "float16", 1500, "auto"),
        (["--dtype", "float", "--context-length", "1K"], "float32", 1024, "auto"),
        (["--generation-config", "vllm", "--max-model-len", "2k"], "bfloat16", 2000, "none"),
        (["--served-model-name", "half"], "bfloat16", 0, "auto"),
    ],
)
def test_values_of_vllms_mean_the_same(given, dtype, length, generation, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr("serving.startup.prepare.check_start", lambda engine: None)
    monkeypatch.setattr(cli, "_lead", seen.append)
    monkeypatch.setattr(sys, "argv", ["jmoe", "serve", *given])
    with pytest.raises(SystemExit):
        cli.main()
    engine = seen[0].engine
    assert (engine.dtype, engine.max_model_len, engine.generation_config) == (
        *(dtype, length),
        generation,
    )
    assert seen[0].served_model_name == (
        "half" if "half" in given[1:] and dtype != "float16" else ""
    )


def test_further_served_names_are_said_to_be_models(monkeypatch, capsys) -> None:
    said = error_of(monkeypatch, capsys, "serve", "DIR", "--served-model-name", "a", "b")
    assert "--served-model-name takes one name" in said
    assert "DIR b" in said


def test_a_setting_that_is_like_none_gets_no_hint(monkeypatch, capsys) -> None:
    said = error_of(monkeypatch, capsys, "serve", "--set", "engine.tensor_parallel_size=2")
    assert "did you mean" not in said
    assert "docs/reference/settings.md" in said
