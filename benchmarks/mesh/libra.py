"""Reckons Libra's prefill times: fitted to its Table 2, held to its Tables 4 to 13, carried to 512
devices. Arithmetic only: nothing is measured, and the same figures come out on every machine.

What is fitted, all of it from Table 2 (Qwen3MoE, 32 sequences of 1,024 tokens, 8 GPUs): the rate of
expert products, the rates of the two exchanges, the seconds a row of prediction and of "others",
and the fixed seconds of what the host does. Table 2 names no imbalance. Libra's is taken for 1, as
its section 5.2 says nearly; that of the others is then the ratio of their MoE times to Libra's.
What Table 2 leaves out is reckoned from sizes and from `rates`. The scheduler, the tokenizer,
embedding and head are left out. Nothing of Tables 4 to 13 is fitted, neither their level nor the
imbalance of GLM-4.5: the paper prints none, so it is taken to be Qwen3MoE's. Their column of output
length 1 is compared, since that is one prefill step.

Rows are tokens of a whole step, over all devices; a device's own rows are those over the number of
devices, since attention is data-parallel. Times are seconds unless a name says otherwise.

Three ways bring rows to experts on G devices in nodes of 8 (`jmoe.parallel.cost.rows_moved`), each
with the same bytes back as there.

NVLink is as fast as Table 2 shows for Libra's exchanges. Both kinds of links are busy at once, so
that the slower one decides. Latencies are left out: a device's rows are megabytes in prefill.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.harness.store import markdown
from benchmarks.mesh import rates
from benchmarks.mesh.compare import PAPERS, errors
from benchmarks.mesh.rates import NIC_BYTES_PER_S
from jmoe.parallel.cost import rows_moved

PAPER = PAPERS["libra"]
NUM_DEVICES = 8
ELEMENT_BYTES = 2
ALPHA, NUM_REPLICAS = 0.5, 8  # of the paper's runs (section 5.2)
OWN, LENGTH = 4096, 1024  # rows of a device and tokens of a sequence; Table 2's
SIZES = (8, 16, 32, 64, 128, 256, 512)
WAYS = ("all-gather", "direct", "forwarded")


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

    @property
    def visit_flops(self) -> float:
        """Operations of one row in one expert: two products up and one down."""
        return 6 * self.d_model * self.d_ff_expert


class Scheme(NamedTuple):
    """A way to balance, as fitted. Fixed times do not depend on the number of rows."""

    imbalance: float  # visits of the fullest device over the mean
    local_share: float  # of visits that need no exchange; 0 where a layer has one stage
    visit_flops_per_s: float
    dispatch_bytes_per_s: float  # received by a device
    combine_bytes_per_s: float
    per_element_s: float  # prediction and "others", per element of a device's own rows
    broadcast_s: float
    host_s: float  # metadata to the host, token sharding, metadata back
    planning_s: float


class Exchange(NamedTuple):
    """Seconds in which rows travel to the experts and back.

    `waits` says that rows are sent only once it is decided who computes what; an all-gather sends
    all to everyone, and need not wait (Libra, section 3.1).
    """

    dispatch: float
    combine: float
    waits: bool = False


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
        """Seconds of the layer. Table 2's MoE layer is all but attention."""
        return sum(self)


MODELS = {name: Geometry(**sizes) for name, sizes in PAPER["models"].items() if name != "note"}


def fit() -> dict[str, Scheme]:
    """Returns the three schemes of Table 2."""
    table = PAPER["breakdown"]
    geometry, rows = MODELS[table["model"]], table["batch"] * table["input_length"]
    visits = rows * geometry.experts_per_token / NUM_DEVICES
    received = (NUM_DEVICES - 1) / NUM_DEVICES * rows * geometry.d_model * ELEMENT_BYTES
    elements = rows / NUM_DEVICES * geometry.d_model
    schemes = {}
    libra_s = 1e-3 * (table["Libra"]["moe_local"] + table["Libra"]["moe_remote"])
    for name in ("Libra", "Lina", "SGLang"):
        ms = table[name]
        moe = ms["moe_local"] + ms["moe_remote"]
        schemes[name] = Scheme(
            imbalance=1e-3 * moe / libra_s,
            local_share=ms["moe_local"] / moe,
            visit_flops_per_s=visits * geometry.visit_flops / libra_s,
            dispatch_bytes_per_s=received / (1e-3 * ms["dispatch"]),
            combine_bytes_per_s=received / (1e-3 * ms["combine"]),
            per_element_s=1e-3 * (ms["predict"] + ms["others"]) / elements,
            broadcast_s=1e-3 * ms["broadcast"],
            host_s=1e-3 * (ms["d2h"] + ms["token_sharding"] + ms["h2d"]),
            planning_s=1e-3 * ms["replica_planning"],
        )
    return schemes


SCHEMES = fit()


def attention_s(geometry: Geometry, own: float, length: int) -> float:
    """Returns the attention of a device's own rows in sequences of `length`, with what is dense
    beside it.

    Projections and, where there is one, the shared expert at the dense rate; half of the square of
    scores, since attention is causal; norms, RoPE and residuals by the bytes they move.
    """
    d = geometry.d_model
    queries = geometry.num_heads * geometry.head_dim
    keys = 2 * geometry.num_kv_heads * geometry.head_dim
    weights = d * (2 * queries + keys) + 3 * d * geometry.d_ff_shared
    products = 2 * own * weights / rates.DENSE_FLOPS_PER_S
    scores = 4 * own * (length / 2) * queries / rates.ATTENTION_FLOPS_PER_S
    elements = own * (8 * d + 2 * (queries + keys))  # two norms with residuals; QK norm and RoPE
    return products + scores + elements * ELEMENT_BYTES / rates.COPY_BYTES_PER_S


def exchange(way: str, scheme: Scheme, geometry: Geometry, own: float, devices: int) -> Exchange:
    """Returns the seconds there and back of `own` rows a device."""
    nvlink, nic = rows_moved(way, geometry.num_experts, geometry.experts_per_token, devices)
    row_bytes = own * geometry.d_model * ELEMENT_BYTES
    nic_s = nic * row_bytes / NIC_BYTES_PER_S
    there = nvlink * row_bytes / scheme.dispatch_bytes_per_s
    back = nvlink * row_bytes / scheme.combine_bytes_per_s
    return Exchange(max(there, nic_s), max(back, nic_s), waits=way != "all-gather")


def layer_times(
    scheme: Scheme, geometry: Geometry, own: float, length: int, sent: Exchange | None = None
) -> LayerTimes:
    """Returns one MoE layer where each device has `own` rows of sequences of `length` (section
    3.1); `sent` replaces the all-gather in one node.

    The local stage hides the dispatch and, beside it, the host's work, both after a broadcast of
    the counts; the remote stage hides the planning of replicas. A scheme without a local stage
    hides nothing.
    """
    share = scheme.local_share
    sent = sent or exchange("all-gather", scheme, geometry, own, NUM_DEVICES)
    visits = scheme.imbalance * own * geometry.experts_per_token
    computing = visits * geometry.visit_flops / scheme.visit_flops_per_s
    local = share * computing
    remote = computing - local
    if share and not sent.waits:
        before_remote = max(sent.dispatch, scheme.host_s)
    else:
        before_remote = sent.dispatch + scheme.host_s
    unhidden_planning = max(0.0, scheme.planning_s - (remote if share else 0.0))
    return LayerTimes(
        attention=attention_s(geometry, own, length),
        local=local,
        exposed=max(0.0, scheme.broadcast_s + before_remote - local) + unhidden_planning,
        remote=remote,
        combine=sent.combine,
        others=scheme.per_element_s * own * geometry.d_model,
    )


def step_s(scheme: Scheme, geometry: Geometry, rows: float, length: int) -> float:
    """Returns a prefill step of `rows` tokens, all layers; the paper's latency at output length
    1.
    """
    own = rows / NUM_DEVICES
    mlp = own * 6 * geometry.d_model * geometry.d_ff_dense / rates.DENSE_FLOPS_PER_S
    dense = attention_s(geometry._replace(d_ff_shared=0), own, length) + mlp
    sparse_layers = geometry.num_layers - geometry.num_dense_layers
    layer = layer_times(scheme, geometry, own, length)
    return sparse_layers * layer.total + geometry.num_dense_layers * dense


def steps() -> Iterator[tuple[str, int, float, float]]:
    """Returns every step of Tables 4 to 13 that ran: model, rows, seconds printed and reckoned."""
    for row in PAPER["prefill_s"]:
        rows, length = row["batch"] * row["input_length"], row["input_length"]
        for name, scheme in SCHEMES.items():
            if row[name] is not None:
                found = step_s(scheme, MODELS[row["model"]], rows, length)
                yield row["model"], rows, row[name], found


def errors_of_steps(_: bool) -> list[dict[str, Any]]:
    """Returns errors by model; steps smaller than the one of Table 2 are reported apart."""
    whole = PAPER["breakdown"]["batch"] * PAPER["breakdown"]["input_length"]
    return [
        {"model": model, "rows": words}
        | errors((s[2], s[3]) for s in steps() if s[0] == model and (s[1] < whole) == small)
        for model in MODELS
        for small, words in ((False, f"{whole:,} or more"), (True, "fewer"))
    ]


def scaling(_: bool) -> list[dict[str, Any]]:
    """Returns milliseconds of a layer by model, size and way.

    Loads are balanced at every size, and a device has as many rows at every size. Visits that need
    no exchange are of the experts of a device and its local replicas, E / G and N alpha of E,
    weighted as Table 2's share is at 8 devices, since they are the busy ones.
    """
    found = []
    for model, geometry in MODELS.items():
        for devices in SIZES:
            held, held_in_paper = (
                geometry.num_experts / d + ALPHA * NUM_REPLICAS for d in (devices, NUM_DEVICES)
            )
            share = SCHEMES["Libra"].local_share * held / held_in_paper
            scheme = SCHEMES["Libra"]._replace(local_share=share)
            layers = {
                way: layer_times(
                    scheme, geometry, OWN, LENGTH, exchange(way, scheme, geometry, OWN, devices)
                )
                for way in WAYS
            }
            ms = {way: 1e3 * layer.total for way, layer in layers.items()}
            found.append({"model": model, "devices": devices, "layer_ms": ms})
    return found


PARTS: dict[str, Callable[[bool], Any]] = {"errors": errors_of_steps, "scaling": scaling}


def table(found: dict[str, Any]) -> list[str]:
    """Returns errors, and milliseconds of a layer."""
    rows = [
        [e["model"], e["rows"], e["count"], f"{100 * e['mean_absolute']:.1f} %",
         f"{100 * e['mean']:+.1f} %"]
        for e in found.get("errors", ())
    ]  # fmt: skip
    lines = markdown(["Tables 4 to 13", "rows", "steps", "mean absolute error", "mean"], rows)
    rows = [
        [size["model"], size["devices"], *(f"{size['layer_ms'][way]:.1f}" for way in WAYS)]
        for size in found.get("scaling", ())
    ]
    heads = [f"ms a layer, {OWN:,} rows a device", "devices", *WAYS]
    return [*lines, "", *markdown(heads, rows)]
