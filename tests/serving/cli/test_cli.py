"""The command line: wiring, errors and numbers. Commands run in this process where they can."""

import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.main import get_command

from jmoe import generate, load_family
from jmoe.api import load
from jmoe.checkpoint import weights_digest
from jmoe.config import read_config
from jmoe.sharing import Sharing, write_sharing
from serving.cli import main as cli
from serving.cli.model_info import kv_bytes_per_token, load_model_config, num_parameters
from serving.cli.options import flag_keys, overrides
from serving.config import GROUPS, described, keys
from serving.errors import SettingsError
from serving.frontend import server
from serving.settings.reading import CONFIGS
from serving.telemetry import version
from tests.variants import variant

GOLDEN = Path(__file__).parents[2] / "golden"
MODELS = ("qwen2_moe_mlp_only_tied", "qwen3_moe_tied_no_head_dim", "mixtral")


@pytest.fixture(autouse=True)
def _level_of_the_log():
    """Restores the log level, which commands that run in this process set."""
    logger = logging.getLogger("serving")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch):
    """Leaves XLA's cache as it is for the tests that follow in this process."""
    monkeypatch.setattr("serving.cli.main._keep_programs", lambda folder: None)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["jmoe", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


def flags_of(*names: str) -> set[str]:
    command = get_command(cli.app)
    for name in names:
        command = command.commands[name]
    return {parameter.name for parameter in command.params}


def commands(command=None, path: tuple[str, ...] = ()):
    """Yields every command below the application, with the words that lead to it."""
    command = command or get_command(cli.app)
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def test_every_parameter_of_every_command_has_a_help_text() -> None:
    missing = [
        " ".join((*path, parameter.name))
        for path, command in commands()
        for parameter in command.params
        if not (getattr(parameter, "help", None) or "").strip()
    ]
    assert missing == []


def test_help_cuts_nothing_at_80_columns(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    for path, command in commands():
        assert run(monkeypatch, *path, "--help") == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80, path
        assert "…" not in text, path
        shown = " ".join(text.split())
        for name, below in getattr(command, "commands", {}).items():
            summary = " ".join((below.help or "").split()).split(". ")[0]
            assert f"{name} {summary}" in shown, (path, name)
        for parameter in command.params:
            for option in getattr(parameter, "opts", ()):
                if option.startswith("--"):
                    assert option in shown, (path, option)
            # Without spaces, since a long word may be broken at a hyphen.
            assert "".join((parameter.help or "").split()) in "".join(text.split()), path


def test_start_is_quick_and_imports_no_jax() -> None:
    heavy = {"jax", "grpc", "pydantic", "numpy", "matplotlib"}
    code = f"import sys, serving.cli.main; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    code = "import sys, serving.frontend.server; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize("command", [[], ["serve"], ["bench", "serve"], ["distill"], ["demo"]])
def test_help(command: list[str], monkeypatch, capsys) -> None:
    assert run(monkeypatch, *command, "--help") == 0
    assert "Usage: jmoe" in capsys.readouterr().out


def test_version(monkeypatch, capsys) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr("serving.telemetry.version.commit", lambda: "8f3827f")
    assert run(monkeypatch, "--version") == 0
    shown = capsys.readouterr().out
    assert re.fullmatch(
        r"jmoe \d+\.\d+\.\d+ \(commit 8f3827f\), jax \d+\.\d+\.\d+, device: cpu\n", shown
    )
    monkeypatch.setattr("serving.telemetry.version.commit", lambda: None)
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == shown.replace(" (commit 8f3827f)", "")


def test_version_imports_no_jax() -> None:
    code = (
        "import sys, contextlib, serving.cli.main as m; sys.argv[1:] = ['--version']\n"
        "with contextlib.suppress(SystemExit): m.main()\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_the_commit_is_the_checkouts_or_the_installations(tmp_path, monkeypatch) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "a")
    head = git("rev-parse", "HEAD")
    (site := tmp_path / "site-packages").mkdir()  # as in a virtual environment in a project
    monkeypatch.syspath_prepend(str(site))
    (about := site / "jmoe-0.1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: jmoe\nVersion: 0.1.0\n")
    assert version.commit(site) is None
    installed = {"url": "https://a.example/jmoe", "vcs_info": {"vcs": "git", "commit_id": "1" * 40}}
    (about / "direct_url.json").write_text(json.dumps(installed))
    assert version.commit(site) == "1" * 40
    assert head.startswith(version.commit(tmp_path) or "none")
    (tmp_path / "file").write_text("b")
    assert (version.commit(tmp_path) or "").endswith("+")


@pytest.mark.parametrize("has_plugin", [False, True])
def test_the_device_is_named_without_cuda(has_plugin, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    plugins = [SimpleNamespace(name="xla_cuda13")] * has_plugin
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: plugins)
    for number in ("0000:01:00.0", "0000:02:00.0"):
        (folder := tmp_path / "proc/driver/nvidia/gpus" / number).mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 14\n")
    told = version.device(tmp_path)
    assert told.startswith(
        "NVIDIA H200, NVIDIA H200" if has_plugin else "cpu (there is NVIDIA H200"
    )
    assert "no driver names" in version.device(tmp_path / "none")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("jmoe ser", "serve"), ("jmoe serve --admin-h", "--admin-host")],
)
def test_bash_completes_commands_and_flags(typed, offered) -> None:
    """By bash itself, with what `jmoe --show-completion bash` prints."""
    jmoe = Path(sys.executable).with_name("jmoe")
    script = """
eval "$(jmoe --show-completion bash)"
read -ra COMP_WORDS <<< "$1"; [[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_jmoe_completion jmoe "${COMP_WORDS[COMP_CWORD]}"
printf "%s\n" "${COMPREPLY[@]}"
"""
    done = subprocess.run(
        ["bash", "-c", script, "bash", typed],
        env={**os.environ, "PATH": f"{jmoe.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.deep
def test_a_taken_port_is_one_line_of_a_process_that_ends() -> None:
    """What listens already says nothing more when the interpreter goes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "serving.cli", "serve", "--port", "0", "--http-port", port]
        done = subprocess.run(
            command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
        )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("Address already in use; choose another --http-port")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--set", "engine.pge_size=1"], "did you mean engine.page_size?"),
        (["serve", "--set", "engine.page_size"], "--set engine.page_size=VALUE"),
        (["serve", "--page-size", "16", "--set", "engine.page_size=16"], "is set twice"),
        (["serve", "--port", "70000"], "port is 70000"),
        (["serve", "--set", "engine.page_size=0"], "engine.page_size is 0; it must be above 0"),
        (
            ["serve", "--set", "engine.dtype=int8"],
            "engine.dtype is 'int8'; it must be one of bfloat16",
        ),
        (["serve", "--status-interval-s", "-1"], "status_interval_s is -1.0; it must be 0 or more"),
        (["serve", "--host", "nohost.invalid"], "cannot listen on nohost.invalid"),
        (["serve", "--config", "dmo"], "default, demo"),
        (["serve", "--port", "0", "--policy", "lifo"], "one of fcfs"),
        (["serve", "--port", "0", "--model", "nowhere"], "nowhere/config.json does not exist"),
        (["generate", "--model", "nowhere", "hello"], "nowhere/config.json does not exist"),
        (["generate", "--tokens", "1,x"], "'1,x' is not a list of token ids"),
        (["generate", "--brownout-threshold", "101", "hello"], "threshold is 101 %"),
        (["info", "bundled", "--address", "127.0.0.1:1"], "give one of"),
        (["info", "--model-config", "qwen"], "qwen3-30b-a3b"),
        (["info", "bundled", "--mesh", "ep=0"], "engine.mesh is 'ep=0'; it must be empty, or ep=N"),
        (["info", "bundled", "--mesh", "tp=2"], "engine.mesh is 'tp=2'; it must be empty, or ep=N"),
        (["info", "bundled", "--mesh", "ep=x"], "engine.mesh is 'ep=x'; it must be empty, or ep=N"),
        (
            ["info", "--address", "127.0.0.1:1", "--mesh", "ep=2"],
            "--mesh needs a model: give MODEL",
        ),
        (
            ["info", "--address", "127.0.0.1:1", "--device-gb", "80"],
            "--device-gb needs a model: give MODEL or --model-config, not --address",
        ),
        (
            ["info", "--mesh", "ep=2", "--device-gb", "nan"],
            "--device-gb is nan; it must be above 0",
        ),
        (["info", "--address", "127.0.0.1:1"], "127.0.0.1:1 does not answer"),
        (["info", "--address", "http://127.0.0.1:1"], "takes HOST:PORT as in"),
        (
            ["bench", "balance", "--variants", "none,all"],
            "variant 'all' is unknown; there are none",
        ),
        (["bench", "balance", "--mesh", "ep=1"], "mesh is 'ep=1'; it must be ep=N with 2 devices"),
        (
            ["bench", "balance", "--replicas", "40"],
            "replicas is 40; the other 7 devices send 2 each",
        ),
        (["bench", "balance", "--spare-slots", "60"], "spare_slots is 60; a device lacks 52 of 60"),
        (["bench", "balance", "--model", "nowhere"], "nowhere/config.json does not exist"),
        (
            ["bench", "balance", "--families", "sums"],
            "task family 'sums' is unknown; there are add",
        ),
        (["distill", "--model", "m", "--data", "d", "--out", "o", "--ways", "2;4"], "--ways is"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, monkeypatch, capsys) -> None:
    assert run(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if line.startswith("jmoe: ")]) == 1


def test_flags_and_pairs_reach_the_server(monkeypatch) -> None:
    seen = []

    async def serve(config, start_engine, metrics, tracer) -> bool:
        seen.append(config)
        return True

    monkeypatch.setattr(server, "serve", serve)
    pairs = ["--set", "engine.brownout.ways=2,8", "--set", "engine.salc.window_s=3"]
    flags = ["--config", "demo", "--way", "8", "--no-salc", "--ttft-slo-s", "2", "--port", "1"]
    assert run(monkeypatch, "serve", *flags, *pairs) == 0
    engine = seen[0].engine
    assert (seen[0].port, engine.dtype, engine.salc.window_s) == (1, "float32", 3.0)
    assert (engine.brownout.ways, engine.brownout.way) == ((2, 8), 8)
    assert (engine.brownout.salc, engine.brownout.ttft_slo_s) == (False, 2.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model nowhere", "nowhere/config.json does not exist"),
        ("--model no-one=nowhere --model b=bundled", "nowhere/config.json does not exist"),
        (f"--model {GOLDEN / MODELS[0]} --strategy partial", "the model has no united experts"),
        ("--way 3", "brownout way is 3; the model has united experts for: 2, 4, 8"),
        ("--policy nope", "policy is 'nope'; it must be one of"),
        ("--controller nope", "controller is 'nope'; it must be one of"),
        (
            "--attention 1 --experts 1 --set engine.asynchronous.layer_rule=nope",
            "layer rule is 'nope'; it must be one of",
        ),
        ("--max-model-len 600", "engine.max_model_len is 600; bundled has 512 positions"),
        ("--chat-template nowhere", "nowhere is not readable"),
        ("--model a=bundled --model b=bundled --family nowhere", "engine.family is 'nowhere', and"),
        (
            "--secret-file nowhere --coordinator a:1 --num-processes 2 --process-index 0 "
            "--mesh ep=2",
            "engine.secret_file is 'nowhere', which cannot be read",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line_before_a_port_opens(
    flags: str, message: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(server, "Server", None)  # nothing listens without one
    assert run(monkeypatch, "serve", *flags.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_serve_has_a_flag_for_each_setting_with_a_group() -> None:
    assert set(flag_keys().values()) <= set(keys())
    assert len(flag_keys()) == sum(bool(setting.group) for setting in described().values())
    assert set(flag_keys()) <= flags_of("serve")


def test_help_of_serve_has_groups_defaults_and_ranges(monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(monkeypatch, "serve", "--help") == 0
    text = capsys.readouterr().out
    titles = [line[:-1] for line in text.splitlines() if re.fullmatch(r"[A-Z]\w+:", line)]
    assert titles == ["Arguments", "Options", *GROUPS]
    words = " ".join(text.split())
    assert "Tokens in a KV page. [default: 64; above 0]" in words
    assert "--log-format <text|json>" in words


def test_settings_come_from_the_environment(monkeypatch, capsys) -> None:
    monkeypatch.setattr(server, "Server", None)
    monkeypatch.setenv("JMOE_ENGINE__MODEL", "/nowhere")
    assert run(monkeypatch, "serve") == 2
    assert "/nowhere" in capsys.readouterr().err
    assert run(monkeypatch, "serve", "--model", "/elsewhere") == 2
    assert "/elsewhere" in capsys.readouterr().err


def test_tool_flags_follow_the_configurations() -> None:
    from serving.bench.balance import BalanceBenchConfig
    from serving.bench.config import BenchConfig
    from serving.bench.demo import DemoConfig
    from training.distill import DistillConfig

    def names(config: type) -> set[str]:
        return {field.name for field in dataclasses.fields(config)}

    assert flags_of("bench", "serve") == names(BenchConfig)
    assert flags_of("bench", "balance") <= names(BalanceBenchConfig)
    assert flags_of("demo") <= names(DemoConfig)
    assert flags_of("distill") >= names(DistillConfig) | {"model", "data", "out", "ways"}
    for command, config in ((["bench", "serve"], BenchConfig), (["distill"], DistillConfig)):
        found = get_command(cli.app)
        for name in command:
            found = found.commands[name]
        defaults = {p.name: p.default for p in found.params if p.default is not None}
        for field in dataclasses.fields(config):
            if field.name in defaults and field.default != ():
                assert type(field.default)(defaults[field.name]) == field.default, field.name


def test_what_a_benchmark_says_goes_above_its_bar(monkeypatch, capsys) -> None:
    @contextlib.contextmanager
    def bar():  # as rich's, which takes stderr while it is drawn
        with contextlib.redirect_stderr(above):
            yield lambda *_: None

    def run_bench(config, say, progress):
        say("warming up")
        return {"completed": 1}

    above = io.StringIO()
    monkeypatch.setattr("serving.cli.tools.progress_bar", bar)
    monkeypatch.setattr("serving.bench.run.run_bench", run_bench)
    monkeypatch.setattr("serving.bench.table.result_table", lambda result: "a table")
    assert run(monkeypatch, "bench", "serve") == 0
    assert (above.getvalue(), capsys.readouterr()) == ("warming up\n", ("a table\n", ""))


def test_overrides() -> None:
    assert overrides({"a": None, "b": 1}, ["c=x=y", "d="]) == {"b": 1, "c": "x=y", "d": ""}


@pytest.mark.deep
def test_generate_in_process(monkeypatch, capsys) -> None:
    flags = ["--model", str(GOLDEN / "qwen2_moe"), "--dtype", "float32", "--max-new-tokens", "3"]
    brownout = ["--strategy", "full", "--brownout-threshold", "0"]
    assert run(monkeypatch, "generate", *flags, *brownout, "--tokens", "1,2,3") == 0
    text, share = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"1,2,3(,\d+){3}", text)
    assert share == "  3 new tokens, 100.0% of expert visits degraded"
    monkeypatch.setattr("sys.stdin", io.StringIO("1,2,3\n"))
    assert run(monkeypatch, "generate", *flags, *brownout, "--tokens", "-") == 0
    assert capsys.readouterr().out.splitlines() == [text, share]


@pytest.mark.deep
def test_each_model_of_a_family_answers(monkeypatch, capsys, tmp_path) -> None:
    """Over a pool in which both share all experts: the second's are the first's."""
    paths = {name: variant(GOLDEN / "qwen2_moe", tmp_path / name, seed) for seed, name in FAMILY}
    shape = read_config(GOLDEN / "qwen2_moe")
    owners = np.zeros((2, shape.num_moe_layers, shape.num_experts), np.int32)
    prints = tuple(weights_digest(path) for path in paths.values())
    sharing = Sharing(tuple(paths), owners, prints)
    write_sharing(tmp_path / "family.json", sharing)
    flags = ["--dtype", "float32", "--max-new-tokens", "4", "--tokens", "1,2,3"]
    models = [f"--model={name}={path}" for name, path in paths.items()]
    family = f"--family={tmp_path / 'family.json'}"
    assert run(monkeypatch, "generate", *models, family, *flags) == 0
    said = capsys.readouterr().out.splitlines()
    want = []
    for model in load_family(paths, sharing, "float32"):
        tokens = generate(model, [[1, 2, 3]], 4).tokens[0]
        want += [f"{model.name}:", ",".join(map(str, [1, 2, 3, *tokens]))]
        want += ["  4 new tokens, 0.0% of expert visits degraded"]
    assert said == want
    assert want[1] != want[4]


FAMILY = ((1, "one"), (2, "two"))


@pytest.mark.parametrize("command", ["generate", "evaluate"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "a=x", "--model", "b=y"], "name their map with --family"),
        (["--model", "a=x", "--family", "none.json"], "--family is none.json; there is no such"),
        (["--family", __file__], "--family needs --model NAME=DIR for each"),
        (["--model", "a=x", "--family", __file__], "--family needs --model NAME=DIR for each"),
    ],
)
def test_models_of_a_family_that_cannot_be_are_named(
    command, flags, message, monkeypatch, capsys
) -> None:
    prompts = ["1"] if command == "generate" else ["--generate-tasks", "1"]
    assert run(monkeypatch, command, *prompts, *flags) == 2
    assert message in capsys.readouterr().err


def test_unknown_strategy_lists_those_there_are(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "serve", "--strategy", "most") == 2
    assert "one of auto, zero, partial, full, module:Class" in capsys.readouterr().err


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_loaded_model(name: str) -> None:
    assert num_parameters(read_config(GOLDEN / name)) == load(GOLDEN / name).num_parameters


@pytest.mark.sized(deep=("qwen3-235b-a22b-235.1-22.2-192512",))
@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [
        ("qwen1.5-moe-a2.7b", 14.3, 2.7, 2 * 24 * 16 * 128 * 2),
        ("qwen3-30b-a3b", 30.5, 3.3, 2 * 48 * 4 * 128 * 2),
        ("qwen3-235b-a22b", 235.1, 22.2, 2 * 94 * 4 * 128 * 2),
        ("mixtral-8x7b", 46.7, 12.9, 2 * 32 * 8 * 128 * 2),
    ],
)
def test_presets_have_their_published_sizes(
    name: str, billions: float, active: float, kv_bytes: int, monkeypatch, capsys
) -> None:
    cfg = load_model_config(name)
    assert num_parameters(cfg) / 1e9 == pytest.approx(billions, abs=0.05)
    assert num_parameters(cfg, cfg.experts_per_token) / 1e9 == pytest.approx(active, abs=0.06)
    assert kv_bytes_per_token(cfg, "bfloat16") == kv_bytes
    assert run(monkeypatch, "info", "--model-config", str(CONFIGS / "models" / f"{name}.yaml")) == 0
    assert f"{billions} B" in capsys.readouterr().out


def test_model_config_that_is_not_there() -> None:
    with pytest.raises(SettingsError):
        load_model_config("gpt")


PCI = "sys/bus/pci/devices/0000:01:00.0"


def pci(vendor: str, kind: str) -> dict[str, str]:
    return {f"{PCI}/vendor": f"{vendor}\n", f"{PCI}/class": f"{kind}\n"}


@pytest.mark.parametrize(
    ("made", "found"),
    [
        ({}, False),
        ({"dev/nvidiactl": ""}, True),
        (pci("0x10de", "0x030200"), True),
        (pci("0x10de", "0x020000"), False),
        (pci("0x1002", "0x030000"), False),
    ],
)
def test_a_gpu_counts_whether_or_not_its_driver_works(tmp_path, made, found) -> None:
    for name, text in made.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.has_nvidia_gpu(tmp_path) == found


@pytest.mark.deep
def test_serve_for_real(monkeypatch, capsys, tmp_path) -> None:
    small = {
        "engine.max_model_len": 32,
        "engine.max_num_seqs": 4,
        "engine.max_prefill_tokens": 32,
        "engine.max_prefill_seqs": 2,
        "engine.threshold_buckets_percent": 100,
        "engine.compilation_cache": "",
        "engine.brownout.way": 0,
    }
    pairs = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    flags = ["--config", "demo", "--model", str(GOLDEN / "qwen2_moe"), *pairs]
    flags += ["--served-model-name", "mine", "--log-format", "json", "-v"]
    flags += ["--timeline", str(tmp_path / "timeline.json")]
    child = subprocess.Popen(
        [sys.executable, "-m", "serving.cli", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Without a GPU, jax must not look for one; gRPC's C core writes to stderr.
        env={**os.environ, "JAX_PLATFORMS": "cpu" if cli.has_nvidia_gpu() else ""}
        | {"GRPC_VERBOSITY": "DEBUG", "GRPC_TRACE": "tcp", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    try:
        assert child.stdout.readline().startswith("jmoe admin on 127.0.0.1:"), child.stderr.read()
        lines = iter(child.stdout.readline, "")
        ready = next((line for line in lines if line.startswith("jmoe ready on ")), None)
        assert ready is not None, child.stderr.read()  # it has ended
        assert run(monkeypatch, "info", "--address", ready.split()[-1]) == 0
        shown = capsys.readouterr().out
        assert "mine" in shown
        assert "KV pages" in shown  # from the admin service, which info has found
        rows = dict(
            re.split("  +", line, maxsplit=1) for line in shown.splitlines() if "  " in line
        )
        assert rows["layers per launch"].startswith("decode 4: ")
        assert int(rows["compiled programs"]) > 2
        assert "best-effort token" not in rows  # no step was seen yet
        for name in (signal.SIGHUP, signal.SIGTERM):
            child.send_signal(name)
        _, log = child.communicate(timeout=120)
    finally:
        child.kill()
        child.wait()
    assert child.returncode == 0
    drawn = json.loads((tmp_path / "timeline.json").read_text())
    assert drawn["traceEvents"][0]["args"] == {"name": "jmoe"}
    entries = [json.loads(line) for line in log.splitlines()]
    assert any(entry["message"].startswith("compiling: ") for entry in entries)
    assert "cuDNN" not in log
    foreign = [(e["level"], e["message"]) for e in entries if e["logger"] == "stderr"]
    assert any(level == "INFO" and "gRPC Tracers: tcp" in text for level, text in foreign)
    assert [e["level"] for e in entries if e["message"].startswith("nothing to read")] == ["INFO"]
    found = {entry["event"]: entry for entry in entries if "event" in entry}
    assert [e["event"] for e in entries if "event" in e] == [
        *("listening", "model", "capacity", "brownout", "ready", "stopped")
    ]
    model = found["model"]
    assert (model["model"], model["architecture"], model["dtype"]) == (
        "mine",
        "qwen2_moe",
        "float32",
    )
    assert model["num_parameters"] * 4 <= model["weight_bytes"]
    assert (model["platform"], model["num_programs"] > 4) == ("cpu", True)
