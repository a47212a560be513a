"""Times of a Libra prefill step, from the breakdown of one layer (Libra, Table 2).

What is fitted, all of it from Table 2 (Qwen3MoE, 32 sequences of 1,024 tokens, 8 GPUs): the rate of
expert products, the rates of the two exchanges, the seconds a row of prediction and of "others",
and the fixed seconds of what the host does. Table 2 names no imbalance. Libra's is taken for 1, as
its section 5.2 says nearly; that of the others is then the ratio of their MoE times to Libra's.

What Table 2 leaves out is reckoned from sizes and three rates that are not fitted to anything here
(`Rates`). The scheduler, the tokenizer, embedding and head are left out.

Rows are tokens of a whole step, over all devices; rows of a device are those over the number of
devices, since attention is data-parallel. Times are seconds unless a name says otherwise.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("libra_paper.json")
"""What the paper prints: geometry of its two models, Table 2, Tables 4 to 13."""
SCHEMES = ("Libra", "Lina", "SGLang")
NUM_DEVICES = 8

ELEMENT_BYTES = 2
LIBRA_IMBALANCE = 1.0


class Rates(NamedTuple):
    """Assumed of an H200, not measured: large bfloat16 products, four fifths of the data sheet's
    989 TFLOP/s; about what FlashAttention-3's paper has for causal attention with heads of 128 and
    some thousand positions; and a copy, nine tenths of the data sheet's 4.8 TB/s.
    """

    dense_flops_per_s: float = 790e12
    attention_flops_per_s: float = 550e12
    memory_bytes_per_s: float = 4.3e12


RATES = Rates()


class Geometry(NamedTuple):
    """Sizes of a model, in elements; `d_ff_shared` and `d_ff_dense` are 0 where there are none."""

    num_layers: int
    num_dense_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    d_ff_expert: int
    d_ff_shared: int
    d_ff_dense: int


class Scheme(NamedTuple):
    """A way to balance, as fitted. Fixed times do not depend on the number of rows."""

    name: str
    imbalance: float  # visits of the fullest device over the mean
    local_share: float  # of visits that need no exchange; 0 where a layer has one stage
    visit_flops_per_s: float
    dispatch_bytes_per_s: float  # received by a device
    combine_bytes_per_s: float
    per_element_s: float  # prediction and "others", per element of a device's own rows
    broadcast_s: float
    host_s: float  # metadata to the host, token sharding, metadata back
    planning_s: float


class LayerTimes(NamedTuple):
    """Parts of an MoE layer that follow one another; seconds.

    `exposed` is what the local stage does not hide of dispatch and of the host's work.
    """

    attention: float
    local: float
    exposed: float
    remote: float
    combine: float
    others: float

    @property
    def total(self) -> float:
        """Seconds of the layer."""
        return sum(self)

    @property
    def moe(self) -> float:
        """Seconds of what Table 2 calls the MoE layer: all but attention."""
        return self.total - self.attention


def read_paper(path: Path = DATA) -> dict[str, Any]:
    """Returns the data file."""
    return json.loads(path.read_text(encoding="utf-8"))


def geometries(paper: dict[str, Any]) -> dict[str, Geometry]:
    """Returns the paper's models by name."""
    return {n: Geometry(**sizes) for n, sizes in paper["models"].items() if n != "note"}


def fit(paper: dict[str, Any]) -> dict[str, Scheme]:
    """Returns the three schemes of Table 2."""
    table = paper["breakdown"]
    geometry = geometries(paper)[table["model"]]
    rows = table["batch"] * table["input_length"]
    visits = rows * geometry.experts_per_token / NUM_DEVICES
    libra_s = _moe_s(table["Libra"])
    rate = LIBRA_IMBALANCE * visits * visit_flops(geometry) / libra_s
    received = (NUM_DEVICES - 1) / NUM_DEVICES * rows * geometry.d_model * ELEMENT_BYTES
    elements = rows / NUM_DEVICES * geometry.d_model
    schemes = {}
    for name in SCHEMES:
        ms = table[name]
        schemes[name] = Scheme(
            name=name,
            imbalance=LIBRA_IMBALANCE * _moe_s(ms) / libra_s,
            local_share=ms["moe_local"] / (ms["moe_local"] + ms["moe_remote"]),
            visit_flops_per_s=rate,
            dispatch_bytes_per_s=received / (1e-3 * ms["dispatch"]),
            combine_bytes_per_s=received / (1e-3 * ms["combine"]),
            per_element_s=1e-3 * (ms["predict"] + ms["others"]) / elements,
            broadcast_s=1e-3 * ms["broadcast"],
            host_s=1e-3 * (ms["d2h"] + ms["token_sharding"] + ms["h2d"]),
            planning_s=1e-3 * ms["replica_planning"],
        )
    return schemes


def _moe_s(ms: dict[str, float]) -> float:
    return 1e-3 * (ms["moe_local"] + ms["moe_remote"])


def visit_flops(geometry: Geometry) -> float:
    """Operations of one row in one expert: two products up and one down."""
    return 6 * geometry.d_model * geometry.d_ff_expert


def attention_s(geometry: Geometry, rows: float, length: int, rates: Rates = RATES) -> float:
    """Returns the attention of a device's own rows in sequences of `length`, with what is dense
    beside it.

    Projections and, where there is one, the shared expert at the dense rate; half of the square of
    scores, since attention is causal; norms, RoPE and residuals by the bytes they move.
    """
    d = geometry.d_model
    queries = geometry.num_heads * geometry.head_dim
    keys = 2 * geometry.num_kv_heads * geometry.head_dim
    weights = d * (2 * queries + keys) + 3 * d * geometry.d_ff_shared
    products = 2 * rows * weights / rates.dense_flops_per_s
    scores = 4 * rows * (length / 2) * queries / rates.attention_flops_per_s
    elements = rows * (8 * d + 2 * (queries + keys))  # two norms with residuals; QK norm and RoPE
    return products + scores + elements * ELEMENT_BYTES / rates.memory_bytes_per_s


class Exchange(NamedTuple):
    """Seconds in which rows travel to the experts and back.

    `waits` says that rows are sent only once it is decided who computes what; an all-gather sends
    all to everyone, and need not wait (Libra, section 3.1).
    """

    dispatch: float
    combine: float
    waits: bool = False


def all_gather(scheme: Scheme, geometry: Geometry, own: float) -> Exchange:
    """Returns every row to all devices of one node, at the rates of Table 2, and parts of all rows
    back.
    """
    received = (NUM_DEVICES - 1) * own * geometry.d_model * ELEMENT_BYTES
    return Exchange(received / scheme.dispatch_bytes_per_s, received / scheme.combine_bytes_per_s)


def layer_times(
    scheme: Scheme,
    geometry: Geometry,
    own: float,
    length: int,
    *,
    imbalance: float | None = None,
    local_share: float | None = None,
    exchange: Exchange | None = None,
    rates: Rates = RATES,
) -> LayerTimes:
    """Returns one MoE layer where each device has `own` rows of sequences of `length` (section
    3.1).

    The local stage hides the dispatch and, beside it, the host's work, both after a broadcast of
    the counts; the remote stage hides the planning of replicas. A scheme without a local stage
    hides nothing. `imbalance` and `local_share` replace the scheme's own, `exchange` the all-gather
    in one node.
    """
    load = scheme.imbalance if imbalance is None else imbalance
    share = scheme.local_share if local_share is None else local_share
    sent = all_gather(scheme, geometry, own) if exchange is None else exchange
    visits = load * own * geometry.experts_per_token
    computing = visits * visit_flops(geometry) / scheme.visit_flops_per_s
    local = share * computing
    remote = computing - local
    if share and not sent.waits:
        before_remote = max(sent.dispatch, scheme.host_s)
    else:
        before_remote = sent.dispatch + scheme.host_s
    unhidden_planning = max(0.0, scheme.planning_s - (remote if share else 0.0))
    return LayerTimes(
        attention=attention_s(geometry, own, length, rates),
        local=local,
        exposed=max(0.0, scheme.broadcast_s + before_remote - local) + unhidden_planning,
        remote=remote,
        combine=sent.combine,
        others=scheme.per_element_s * own * geometry.d_model,
    )


def step_s(
    scheme: Scheme,
    geometry: Geometry,
    rows: float,
    length: int,
    imbalance: float | None = None,
    rates: Rates = RATES,
) -> float:
    """Returns a prefill step of `rows` tokens, all layers; the paper's latency at
    output length 1.
    """
    own = rows / NUM_DEVICES
    layer = layer_times(scheme, geometry, own, length, imbalance=imbalance, rates=rates)
    dense = dense_layer_s(geometry, own, length, rates)
    sparse_layers = geometry.num_layers - geometry.num_dense_layers
    return sparse_layers * layer.total + geometry.num_dense_layers * dense


def dense_layer_s(geometry: Geometry, own: float, length: int, rates: Rates = RATES) -> float:
    """Returns a layer without experts, of a device's own rows."""
    mlp = own * 6 * geometry.d_model * geometry.d_ff_dense / rates.dense_flops_per_s
    return attention_s(geometry._replace(d_ff_shared=0), own, length, rates) + mlp
