"""What objects show in a notebook: one short line, or an HTML table in which text stays text."""

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import jax
import numpy as np
import pytest

import jmoe
from jmoe.config import ModelConfig, RopeConfig
from jmoe.experts import ExpertPool
from jmoe.weights import ResidentWeights
from pallas_kernels.activation import SILU, Gelu

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENS = [[5, 60, 17, 33, 8]]
pytestmark = pytest.mark.usefixtures("compiled_in_a_hurry")


@pytest.fixture(scope="module")
def model(united_models):
    return united_models("qwen2_moe")


@pytest.fixture(scope="module")
def generation(model):
    return jmoe.generate(model, [[5, 6], [7]], 2, stop_token_ids=(), page_size=4)


def shown(model, generation):
    """Returns every object of `jmoe.__all__`, what the functions return, and what a model holds."""
    yield from (getattr(jmoe, name) for name in jmoe.__all__)
    yield from (model, model.config, model.config.rope, model.pool, model.table, generation)
    yield from (*model.united.values(), jmoe.Brownout("partial", 40, 2), model.prepare(None))
    yield jmoe.forward(model, TOKENS, return_stats=True, return_hidden=True)[1]
    yield jmoe.brownout.plan([[0, 1]], num_experts=4, threshold_percent=50, way=2)
    yield from (jmoe.ConfigError("x"), jmoe.CheckpointError("y"))


@pytest.mark.deep
def test_the_repr_of_each_public_object_is_one_short_line(model, generation):
    for one in shown(model, generation):
        assert len(repr(one)) < 300, one
        assert "\n" not in repr(one)


def test_a_model_says_what_it_is(model):
    assert repr(model) == (
        "Model('qwen2_moe', qwen2_moe, 2 layers, 7 experts, 3 a token, 46,368 parameters, "
        "float32, ways 2, 3)"
    )
    resident = ResidentWeights(model.weights, {})
    long = dataclasses.replace(model, name="x" * 1000, resident=resident)
    assert len(repr(long)) < 300
    assert repr(long).endswith("no united experts)")


def test_arrays_show_shapes_and_dtypes(model):
    plan = jmoe.brownout.plan([[0, 1]], num_experts=4, threshold_percent=50, way=2)
    assert repr(plan) == "Plan(expert_ids: int32[1, 2], degraded: bool[1, 2], s1: bool[4])"
    abstract = jax.eval_shape(lambda pool: pool, model.pool)
    assert repr(abstract) == repr(model.pool)
    assert repr(ExpertPool(None, np.zeros((1, 2, 3)))) == (  # type: ignore[arg-type]
        "ExpertPool(gate_up: None, down: float64[1, 2, 3])"
    )
    assert "way 2, 2 MoE layers of 4, gate_up: float32[2, 4, 32, " in repr(model.united[2])


def changed(value):
    """Returns another value of the same kind."""
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (*value, 1)
    if value == SILU:
        return Gelu()
    return value + "x" if isinstance(value, str) else value * 2 + 2


@pytest.mark.parametrize(
    ("outer", "name"),
    [("config", field.name) for field in dataclasses.fields(ModelConfig) if field.name != "rope"]
    + [("rope", field.name) for field in dataclasses.fields(RopeConfig)],
)
def test_configurations_that_differ_have_different_reprs(outer, name, model):
    """Compiled programs are kept under them (serving/execution/programs.py)."""
    cfg = model.config
    inner = cfg if outer == "config" else cfg.rope
    other = dataclasses.replace(cfg)
    one = object.__new__(type(inner))  # without the checks: any field may have any value
    for field in dataclasses.fields(inner):
        value = getattr(inner, field.name)
        object.__setattr__(one, field.name, changed(value) if field.name == name else value)
    if outer == "config":
        other = one
    else:
        object.__setattr__(other, "rope", one)
    assert repr(other) != repr(cfg)
    assert repr(dataclasses.replace(cfg)) == repr(cfg)


class Page(HTMLParser):
    """Cells of a table; fails where tags do not nest."""

    def __init__(self, html):
        super().__init__()
        self.open, self.cells, self.rows = [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in {"table", "caption", "tr", "th", "td"}
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


def test_a_model_is_a_table_of_geometry_memory_and_ways(model):
    rows = dict(Page(model._repr_html_()).rows)
    assert rows["architecture"] == "qwen2_moe"
    assert rows["experts a layer"] == "7, 3 a token"
    assert rows["parameters"] == "46,368, float32"
    assert rows["ways at hand"] == "2, 3"
    number = [
        int(rows[key].split(" ")[0].replace(",", "")) for key in rows if key.startswith("memory, ")
    ]
    leaves = jax.tree.leaves((model.params, model.pool))
    assert sum(number) == sum(leaf.nbytes for leaf in leaves)
    assert Page(dataclasses.replace(model, name="<b>&")._repr_html_()).rows


RUDE = '<script>alert("1 & 2")</script>'


def test_generation_is_a_table_with_escaped_text(generation):
    out = dataclasses.replace(
        generation, prompts=[RUDE, [1, 2, 3]], texts=["</table>", "a\nb " + "y" * 1000]
    )
    assert "<script" not in out._repr_html_()
    header, first, second = Page(out._repr_html_()).rows
    assert header == ["prompt", "text", "tokens", "degraded visits"]
    assert first == [RUDE, "</table>", "2", "0.0%"]
    assert second[0] == "1, 2, 3"
    assert second[1].startswith("a b yyy")
    assert len(second[1]) <= 200
    assert len(repr(out)) < 300


def test_a_generation_of_many_prompts_stays_short(generation):
    many = {
        field.name: (getattr(generation, field.name) or []) * 50
        for field in dataclasses.fields(generation)
    }
    html = jmoe.Generation(**{**many, "texts": None})._repr_html_()
    assert len(Page(html).rows) == 21
    assert "and 80 prompts more" in html


def test_generation_says_how_much_was_degraded(model):
    out = jmoe.generate(
        model, [[5, 6], [7]], 2, jmoe.Brownout("full", 0), stop_token_ids=(), page_size=4
    )
    assert out.degraded_shares == [1.0, 1.0]
    assert "100.0% of 30 expert visits degraded" in repr(out)
    assert out.prompts == [[5, 6], [7]]
