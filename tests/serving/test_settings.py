"""Settings: values arrive as given, and errors name what is wrong."""

import json
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from serving.config import (
    BrownoutConfig,
    EngineConfig,
    SalcConfig,
    ServerConfig,
    described,
    keys,
)
from serving.errors import SettingsError
from serving.settings.composes import (
    AEP,
    ALL_THERE,
    COMPOSES,
    MESH,
    ONE_THERE,
)
from serving.settings.reading import CONFIGS, check, load, read_yaml, settled, to_yaml, variable

sizes = st.integers(1, 10**6)
seconds = st.floats(1e-3, 1e6)
percents = st.integers(0, 100)
ascending = st.lists(sizes, max_size=3, unique=True).map(lambda v: tuple(sorted(v)))
configs = st.builds(
    ServerConfig,
    host=st.text(min_size=1),
    port=st.integers(0, 65535),
    drain_timeout_s=seconds,
    engine=st.builds(
        EngineConfig,
        model=st.text(min_size=1).filter(str.isprintable),
        dtype=st.sampled_from(["bfloat16", "float32"]),
        max_num_seqs=sizes,
        max_model_len=sizes,
        decode_buckets=ascending.map(lambda v: (*v, 10**6 + 1)),
        brownout=st.builds(
            BrownoutConfig,
            strategy=st.sampled_from(["zero", "partial", "full"]),
            ways=ascending,
            prefill_threshold_percent=percents,
            salc=st.booleans(),
            ttft_slo_s=seconds,
        ),
        salc=st.builds(SalcConfig, shrink_ratio=st.floats(0.01, 1), min_samples=sizes),
    ),
)


def flat(config: object, prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in asdict(config).items() if not isinstance(config, dict) else config.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return found


@example(config=ServerConfig(engine=EngineConfig(model="0E0")))
@given(config=configs)
@settings(max_examples=50)
def test_yaml_round_trip(config: ServerConfig, tmp_path_factory) -> None:
    path = tmp_path_factory.getbasetemp() / "settings.yaml"
    path.write_text(to_yaml(asdict(config)), encoding="utf-8")
    assert load(path) == config


@given(config=configs)
@settings(max_examples=50)
def test_every_key_can_be_overridden_as_text_or_as_a_value(config: ServerConfig) -> None:
    values = flat(config)
    assert load(None, values) == config
    texts = {
        key: ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for key, value in values.items()
    }
    assert load(None, texts) == config
    assert set(values) == set(keys())


def test_presets_load_and_default_is_the_default() -> None:
    assert load("default") == load() == ServerConfig()
    assert flat(read_yaml(CONFIGS / "serving" / "default.yaml")).keys() == keys().keys()
    for path in (CONFIGS / "serving").glob("*.yaml"):
        assert load(path.stem) == load(path)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("port: 1\nengine: {page_size: 16, brownout: {way: 4}}\n")
    config = load(path, {"engine.brownout.way": "8", "engine.compilation_cache": ""})
    assert (config.port, config.engine.page_size, config.engine.brownout.way) == (1, 16, 8)
    assert config.engine.compilation_cache == ""


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_of_json_are_numbers(tmp_path_factory, value) -> None:
    """`rms_norm_eps` is 1e-05 in many a config.json, which YAML 1.1 takes for text."""
    path = tmp_path_factory.mktemp("json") / "config.json"
    path.write_text(json.dumps({"value": value}))
    assert read_yaml(path) == {"value": value}


@given(st.text("0123456789abcdef", min_size=1))
def test_what_is_no_number_is_text(tmp_path_factory, value) -> None:
    """Such as the hash of a key, which may begin like one."""
    path = tmp_path_factory.mktemp("yaml") / "keys.yaml"
    path.write_text(f"value: {value}-")
    assert read_yaml(path) == {"value": f"{value}-"}
    path.write_text(f"value: {value}abc")
    assert read_yaml(path) == {"value": f"{value}abc"}


@pytest.mark.parametrize("text", ["1e-05", "-2E+3", "1.e4", "7e2"])
def test_a_number_with_an_exponent_needs_no_point(text, tmp_path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(f"value: {text}")
    assert read_yaml(path) == {"value": float(text)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {pge_size: 16}", "unknown key engine.pge_size; did you mean engine.page_size"),
        ("brownout: {way: 8}", "unknown key brownout"),
        ("engine: {page_size: '16'}", "engine.page_size is '16'; it must be an integer"),
        ("engine: {page_size: true}", "engine.page_size is True; it must be an integer"),
        ("engine: {page_size: 1.5}", "engine.page_size is 1.5; it must be an integer"),
        ("engine: {brownout: {salc: 1}}", "engine.brownout.salc is 1; it must be true or false"),
        ("engine: {salc: {window_s: soon}}", "window_s is 'soon'; it must be a number"),
        ("engine: {decode_buckets: [1, x]}", "decode_buckets is 'x'; it must be a list of integer"),
        ("engine: {decode_buckets: 64}", "decode_buckets is 64; it must be a list of integers"),
        ("engine: 3", "engine is 3; it must be a mapping"),
        ("host: null", "host is None; it must be a string"),
        ("[1]", "holds a list"),
        ("a: [", "cannot be read as YAML"),
        ("2026-01-01: 1", "cannot be read as settings: keys must be"),
        ("engine: &a {model: *a}", "cannot be read as settings"),
        ("port: 1\nhost: a\nport: 2", "port is there twice, in lines 1 and 3"),
        ("engine:\n  way: 1\n  page_size: 16\n  way: 2", "way is there twice, in lines 2 and 4"),
        ("engine: {way: 1}\n'engine': {}", "engine is there twice, in lines 1 and 2"),
    ],
)
def test_wrong_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_merged_in_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n")
    assert read_yaml(path)["c"] == {"x": 3, "y": 4}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "engine.brownout.wy",
            "8",
            "unknown key engine.brownout.wy; did you mean engine.brownout.w",
        ),
        ("page_size", "8", "did you mean engine.page_size?"),
        ("engine.page_size", "x", "engine.page_size is 'x'; it must be an integer"),
        ("engine.page_size", True, "engine.page_size is True; it must be an integer"),
        ("engine.decode_buckets", "1,x", "it must be a list of integers"),
        ("engine.brownout", "8", "it must be a mapping"),
        ("port", "65536", "port is 65536; it must be between 0 and 65535"),
        ("port", "-1", "between 0 and 65535"),
        ("served_model_name", "a\nb", r"served_model_name is 'a\nb'; it must be printable"),
        (
            "allowed_origins",
            "*,a.b",
            "scheme://host[:port] of each, in lower case, and one is 'a.b'",
        ),
        ("engine.model", "/models/a\nb", "a directory with a printable name"),
        ("engine.models", "a\nb=x,c=y", "NAME=DIR of each model with a printable name"),
        ("drain_timeout_s", "-1", "0 or more"),
        ("status_interval_s", "-1", "0 or more"),
        ("log_format", "yaml", "one of text, json"),
        ("drain_timeout_s", "inf", "0 or more"),
        ("engine.page_size", "0", "above 0"),
        ("engine.brownout.itl_slo_s", "nan", "above 0"),
        ("engine.brownout.decode_threshold_percent", "101", "between 0 and 100"),
        ("engine.salc.shrink_ratio", "0", "above 0 and at most 1"),
        ("engine.salc.floor_percent", "50.5", None),
        ("engine.threshold_buckets_percent", "20,40", "ends with 100"),
        ("engine.threshold_buckets_percent", "40,20,100", "ascending"),
        ("engine.decode_buckets", "1,2", "empty, or reach 64"),
        ("engine.late_decode_buckets", "8,64", "sizes below 64, the largest"),
        ("engine.late_prefill_buckets", "64,512", "sizes below 512, the largest"),
        ("engine.max_model_len", "-1", "0 or more"),
        ("engine.dtype", "int8", "one of bfloat16, float16, float32"),
        ("engine.brownout.strategy", "most", "one of auto, zero, partial, full"),
        ("metrics_port", "50051", "other than port"),
        ("engine.model", "", "a directory, OWNER/NAME of the Hub, or bundled"),
    ],
)
def test_wrong_overrides_are_named(key: str, value: object, message: str | None) -> None:
    if message is None:
        load(None, {key: value})
        return
    with pytest.raises(SettingsError) as caught:
        load(None, {key: value})
    assert message in str(caught.value)
    assert key in str(caught.value)


def test_values_that_contradict_each_other() -> None:
    with pytest.raises(SettingsError, match="one of ways"):
        load(None, {"engine.brownout.ways": "2,4", "engine.brownout.way": "8"})
    with pytest.raises(SettingsError, match="at most ceiling_percent 40"):
        load(None, {"engine.salc.floor_percent": "50", "engine.salc.ceiling_percent": "40"})
    with pytest.raises(SettingsError, match="max_num_seqs is 0"):
        check(ServerConfig(engine=replace(EngineConfig(), max_num_seqs=0)))


def test_unknown_preset_lists_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"dmo is neither .* default, demo"):
        load("dmo")


MODE_SETTINGS = {
    AEP: {"engine.asynchronous.attention": 1, "engine.asynchronous.experts": 1},
    MESH: {"engine.mesh": "ep=2"},
    ALL_THERE: {"engine.models": ("a=x", "b=y")},
    ONE_THERE: {"engine.models": ("a=x", "b=y"), "engine.resident_sets": 1},
}
ASKING = {
    "engine.mesh": "ep=2",
    "engine.coordinator": "a:1",
    "engine.models": ("a=x", "b=y"),
    "engine.family": "family.json",
    "engine.best_effort_share": 0.3,
    "engine.threshold_buckets_percent": (50, 100),
    "engine.enforce_eager": True,
    "engine.mixed_models": 3,
    "engine.brownout.strategy": "module:Class",
    "engine.brownout.levels": True,
    "engine.model_stay_s": 1.0,
    "engine.brownout.best_effort_ttft_slo_s": 1.0,
    "engine.brownout.best_effort_itl_slo_s": 1.0,
}
"""Values that turn a feature on; settings that are not here are numbers."""


@pytest.mark.parametrize("mode", MODE_SETTINGS)
def test_what_a_mode_does_not_go_with_is_refused_by_name(mode):
    base = MODE_SETTINGS[mode]
    load(None, {**base, "engine.best_effort_share": 0.0, "engine.mixed_models": 1})
    features = [feature for own, feature in COMPOSES if own == mode and feature.startswith("eng")]
    assert features
    for feature in features:
        key, _, value = feature.partition("=")
        wanted = value or ASKING.get(key, 1)
        why = re.escape(f"{key} is {wanted!r}; it must be left out with ")
        with pytest.raises(SettingsError, match=why) as error:
            load(None, {**base, key: wanted})
        assert COMPOSES[mode, feature] in str(error.value)


def test_the_page_has_the_table_of_what_does_not_go_together(request):
    page = (request.config.rootpath / "docs" / "operating.md").read_text(encoding="utf-8")
    table = page.split("## What does not go together")[1].split("\n## ")[0]
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines() if "|" in line][2:]
    for above, row in pairwise(rows):  # an empty cell repeats the one above
        row[:] = [cell or repeated for cell, repeated in zip(row, above, strict=True)]
    assert [(mode, feature.replace("`", ""), why) for mode, feature, why in rows] == [
        (mode, feature.replace("`", ""), why) for (mode, feature), why in COMPOSES.items()
    ]


def test_all_unknown_keys_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("ttft_slo_s: 1\nengine: {window_s: 2, page_size: x, zzz: 1}\nprot: 1\n")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert str(caught.value).removeprefix(f"{path}: ").split("; ") == [
        "engine.page_size is 'x'",
        "it must be an integer",
        "unknown key engine.window_s",
        "did you mean engine.salc.window_s?",
        "unknown key engine.zzz",
        "docs/reference/settings.md has all",
        "unknown key ttft_slo_s",
        "did you mean engine.brownout.ttft_slo_s?",
        "unknown key prot",
        "did you mean port?",
    ]


def test_the_same_key_of_other_sections_is_suggested_first() -> None:
    with pytest.raises(SettingsError, match=r"engine.salc.interval_s or engine.balance.interval_s"):
        load(None, {"engine.interval_s": "1"})


def test_environment_stands_between_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("port: 1\nengine: {page_size: 16, max_num_seqs: 3, dtype: float16}\n")
    environment = {
        "JMOE_ENGINE__PAGE_SIZE": "32",
        "JMOE_ENGINE__MAX_NUM_SEQS": "4",
        "JMOE_ENGINE__BROWNOUT__SALC": "off",
        "JMOE_ENGINE__DECODE_BUCKETS": "4,8",
        "JMOE_SERVER__HTTP_PORT": "-1",
        "JMOE_TLS_CERT": "a client's",
        "JMOE_API_KEY": "a client's",
        # As Kubernetes sets beside services named jmoe and jmoe-http.
        "JMOE_PORT": "tcp://10.0.0.1:50051",
        "JMOE_PORT_50051_TCP_ADDR": "10.0.0.1",
        "JMOE_SERVICE_HOST": "10.0.0.1",
        "JMOE_SERVICE_PORT_GRPC": "50051",
        "JMOE_HTTP_PORT": "tcp://10.0.0.2:80",
        "JMOE_HTTP_SERVICE_PORT": "80",
        "PATH": "/bin",
    }
    config = load(path, {"engine.page_size": 64}, environment)
    assert (config.port, config.http_port, config.tls_cert) == (1, -1, "")
    assert (config.engine.page_size, config.engine.max_num_seqs) == (64, 4)
    assert (config.engine.dtype, config.engine.decode_buckets) == ("float16", (4, 8))
    assert config.engine.brownout.salc is False


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("https://a.com, https://b.com", ("https://a.com", "https://b.com")),
        (" [https://a.com ,https://b.com] ", ("https://a.com", "https://b.com")),
        ("https://[::1]", ("https://[::1]",)),
        ("[https://[::1], https://[::2]:80]", ("https://[::1]", "https://[::2]:80")),
        ("", ()),
        ("[ ]", ()),
    ],
)
def test_a_list_as_text_has_the_values_between_its_commas(text, parts) -> None:
    assert load(environment={"JMOE_SERVER__ALLOWED_ORIGINS": text}).allowed_origins == parts
    keys = load(overrides={"engine.allow_unknown_config": text}).engine.allow_unknown_config
    assert keys == parts
    assert load(overrides={"engine.decode_buckets": "[8 , 64]"}).engine.decode_buckets == (8, 64)
    brackets = "[::1],[::2]"  # no pair around the whole
    unknown = load(overrides={"engine.allow_unknown_config": brackets}).engine.allow_unknown_config
    assert unknown == ("[::1]", "[::2]")


def test_every_setting_has_a_variable_of_its_own() -> None:
    values = {"port": "7", "engine.salc.window_s": "9", "engine.models": "a=x,b=y"}
    named = {variable(key): value for key, value in values.items()}
    assert load(None, None, named) == load(None, values)
    assert len({variable(key) for key in keys()}) == len(keys())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JMOE_ENGINE__PAGE_SIZ", "1", "is no setting; did you mean JMOE_ENGINE__PAGE_SIZE?"),
        ("JMOE_ENGINE_MODEL", "x", "did you mean JMOE_ENGINE__MODEL?"),
        ("JMOE_MODEL", "x", "did you mean JMOE_ENGINE__MODEL?"),
        ("JMOE_PORT", "8000", "did you mean JMOE_SERVER__PORT?"),
        ("JMOE_HTTP_PORT", "8000", "did you mean JMOE_SERVER__HTTP_PORT?"),
        ("JMOE_FOO", "1", "JMOE_FOO is no setting"),
        ("jmoe_engine__page_size", "3", "did you mean JMOE_ENGINE__PAGE_SIZE?"),
        ("JMOE_PORT__X", "1", "JMOE_PORT__X is no setting"),
        ("JMOE_ENGINE__PAGE_SIZE", "x", "JMOE_ENGINE__PAGE_SIZE: engine.page_size is 'x'; it must"),
        ("JMOE_SERVER__PORT", "65536", "port is 65536; it must be between 0 and 65535"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load(None, None, {name: value})


def test_every_default_is_in_its_range() -> None:
    assert described().keys() == keys().keys()
    for key, setting in described().items():
        assert setting.help.endswith("."), key
        assert setting.range is None or setting.range.holds(flat(ServerConfig())[key]), key


@pytest.mark.parametrize(
    ("text", "overrides", "environment", "admission"),
    [
        ("", {}, {}, "auto"),
        ("engine: {brownout: {itl_slo_s: 0.1}}", {}, {}, "auto"),
        ("engine: {brownout: {ttft_slo_s: 0.3}}", {}, {}, "objective"),
        ("engine: {admission: queue, brownout: {ttft_slo_s: 0.3}}", {}, {}, "queue"),
        ("", {"engine.brownout.ttft_slo_s": 0.3}, {}, "objective"),
        ("", {}, {"JMOE_ENGINE__BROWNOUT__TTFT_SLO_S": "0.3"}, "objective"),
    ],
)
def test_who_sets_an_objective_has_late_requests_refused(
    text, overrides, environment, admission, tmp_path
):
    path = tmp_path / "own.yaml"
    path.write_text(text or "{}")
    found = settled(load(path, overrides, environment))
    assert found.engine.admission == admission


def test_presets_objectives_are_nobodys():
    assert settled(load("default")).engine.admission == "auto"
    demo = load("demo", {"engine.brownout.ttft_slo_s": 0.3})
    assert settled(demo).engine.admission == "queue"
