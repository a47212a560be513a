"""The end-to-end stage: all layers' united experts of one way against the whole model's logits.

What a layer's united experts get wrong reaches the layers after it, and those can make up for it
only if they are trained together. The student is the model under partial brownout, with S1 and S2
picked as serving picks them; the teacher is the model itself; the loss is the Kullback-Leibler
divergence of their next-token distributions. Only united experts move. The devices share out all
experts and what Adam keeps; the rest of the model is on each.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jmoe.api import Model
from jmoe.config import ModelConfig
from jmoe.model import embed
from pallas_kernels.backend import backend
from training.dispatch import combine_rows, expert_layer, scatter_rows
from training.distill.config import DistillConfig
from training.distill.data import Corpus
from training.distill.expert import Experts, Stacked
from training.distill.fit import HELD_OUT, DistillError, Note, optimizer
from training.distill.objectives import degraded_to, united_dispatch
from training.distill.parallel import (
    WHOLE,
    data_mesh,
    gathered,
    loss_and_grads,
    on_all_rows,
    on_host,
    over_devices,
)
from training.network import layer_forward, logits_of, of_kind
from training.packing import Batch

_CAPACITY = 4.0  # rows of a routed expert's buffer over the even share, teacher and student alike

Arrays = tuple[Array, Array, Array, Array]
"""tokens, positions, items, weights; `[B, S]` each."""


class Frozen(NamedTuple):
    """The model, and which united expert stands in for which routed one, by MoE layer."""

    params: Any
    experts: Stacked  # of the pool
    slots: Int[Array, "L m"]
    groups: Int[Array, "L m"]


_AXIS = {"gate_up": 2, "down": 3}
"""The model's width in `[L, n, d, 2f]` and `[L, n, f, d]`: the axis that devices share out.

Experts and what Adam keeps of the united ones are by far the most of the memory; a layer's are put
together when it is its turn.
"""

UNITED_SPECS = {
    name: PartitionSpec(*(None,) * axis, "data", *(None,) * (3 - axis))
    for name, axis in _AXIS.items()
}
POOL_SPECS = {
    "gate_up": PartitionSpec(None, "data", None),
    "down": PartitionSpec(None, None, "data"),
}


def _specs(united: Iterable[str]) -> dict[str, PartitionSpec]:
    return {name: UNITED_SPECS.get(name, WHOLE) for name in united}


def frozen_specs(frozen: Frozen) -> Frozen:
    """Returns where each of the model's arrays lies."""
    experts = {name: POOL_SPECS.get(name, WHOLE) for name in frozen.experts}
    return Frozen(*cast(Any, (WHOLE, experts, WHOLE, WHOLE)))


class _MoELayer(NamedTuple):
    """Which experts a layer has, or every layer of a segment; no `united`: the exact model."""

    slots: Int[Array, "*l m"]
    groups: Int[Array, "*l m"]
    united: Stacked | None


def _logits(
    cfg: ModelConfig,
    frozen: Frozen,
    united: Stacked | None,
    arrays: Arrays,
    key: Array,
    config: DistillConfig,
) -> Float[Array, "B S V"]:
    """Returns the model's logits; with `united [L, U, ...]` those of the model under brownout."""
    tokens, positions, items, _ = arrays
    dtype = jnp.dtype(config.dtype)
    num_experts, top_k = cfg.num_experts, cfg.experts_per_token
    share = tokens.size * top_k / num_experts
    capacity = min(tokens.size, max(8, int(_CAPACITY * share) // 8 * 8))
    # A decode step has rows of many sequences: here, of all devices.
    order = jax.random.permutation(key, tokens.size * jax.lax.axis_size("data"))
    back = jnp.argsort(order)
    each = [of_kind(cfg, kind, positions, items) for kind in cfg.attention_kinds]

    def whole(experts: Stacked) -> Stacked:
        low = {name: leaf.astype(dtype) for name, leaf in experts.items()}
        return low | {name: gathered(low[name], axis - 1) for name, axis in _AXIS.items()}

    def one_layer(by_kind: Any, x: Array, scanned: Any) -> tuple[Array, None]:
        layer, number, kind, own = scanned  # own: a _MoELayer, or None
        turn, attention = jax.tree.map(lambda leaf: leaf[kind], by_kind)

        def routed(h: Array, weights: Array, ids: Array) -> tuple[Array, None]:
            originals = whole({name: leaf[own.slots] for name, leaf in frozen.experts.items()})
            if own.united is None:
                out, _ = expert_layer(h, weights, ids, originals, capacity, cfg.activation)
                return out, None
            layer_key = jax.random.fold_in(key, number)

            def degraded(ids: Array) -> Array:
                groups, block = own.groups, config.decode_batch
                return degraded_to(ids[order], groups, layer_key, block)[back]

            substitute = on_all_rows(degraded, ids)
            exact = jnp.where(substitute < 0, ids, -1)
            out, _ = expert_layer(h, weights, exact, originals, capacity, cfg.activation)
            united = whole(own.united)
            plan = united_dispatch(substitute, united["down"].shape[0])
            weights = jnp.where(substitute < 0, 0.0, weights)
            answers = Experts(united, cfg.activation)(scatter_rows(h, plan))
            return out + combine_rows(answers, weights, plan), None

        return layer_forward(cfg, layer, x, turn, attention, routed, dtype=dtype)[0], None

    x = embed(cfg, frozen.params, tokens.reshape(-1)).astype(jnp.float32)
    # On a GPU gradients keep what enters a layer, and compute the rest of it again: the copy of a
    # layer's experts alone would be the whole model once more. A CPU has room, and is slow.
    body, moe_layer = one_layer if backend() == "cpu" else jax.checkpoint(one_layer), 0
    for (is_moe, first, count), segment in zip(
        cfg.segments(), frozen.params["segments"], strict=True
    ):
        own = slice(moe_layer, moe_layer + (count if is_moe else 0))
        experts = _MoELayer(frozen.slots, frozen.groups, united)
        experts = jax.tree.map(lambda leaf, own=own: leaf[own], experts) if is_moe else None
        numbers = jnp.arange(own.start, own.start + count, dtype=jnp.int32)
        own_kinds = cfg.layer_attention[first : first + count]
        there = list(dict.fromkeys(map(cfg.attention_kinds.index, own_kinds)))
        by_kind = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(each[at] for at in there))
        kinds = [there.index(cfg.attention_kinds.index(kind)) for kind in own_kinds]
        scanned = segment, numbers, jnp.asarray(kinds, jnp.int32), experts
        x, _ = jax.lax.scan(partial(body, by_kind), x, scanned)
        moe_layer = own.stop
    return logits_of(cfg, frozen.params, x, dtype).reshape(*tokens.shape, -1)


def _loss_and_grads(
    cfg: ModelConfig,
    frozen: Frozen,
    united: Stacked,
    arrays: Arrays,
    key: Array,
    config: DistillConfig,
    mesh: Mesh,
) -> tuple[Float[Array, ""], Stacked]:
    """Returns the mean divergence from the exact model, in nats a token, over rows spread over
    devices, and its gradient.
    """

    def share(united: Stacked, frozen: Frozen, arrays: Arrays, key: Array) -> Array:
        weights = arrays[3]
        total = jnp.maximum(over_devices(jnp.sum(weights)), 1e-6)
        wanted = jax.nn.log_softmax(_logits(cfg, frozen, None, arrays, key, config))
        got = jax.nn.log_softmax(_logits(cfg, frozen, united, arrays, key, config))
        return jnp.sum(weights * jnp.sum(jnp.exp(wanted) * (wanted - got), axis=-1)) / total

    return loss_and_grads(
        share,
        mesh,
        united,
        frozen,
        arrays,
        key,
        params_specs=_specs(united),
        fixed_specs=frozen_specs(frozen),
    )


def _optimizer(config: DistillConfig, d_model: int) -> optax.GradientTransformation:
    return optimizer(config, config.refine_rate(d_model), config.refine_steps)


@partial(jax.jit, static_argnames=("cfg", "config", "mesh"), donate_argnums=(1, 2))
def _step(
    cfg: ModelConfig,
    united: Stacked,
    state: Any,
    frozen: Frozen,
    arrays: Arrays,
    key: Array,
    config: DistillConfig,
    mesh: Mesh,
) -> tuple[Stacked, Any, Float[Array, ""]]:
    """Takes one optimizer step; returns the divergence before it as well."""
    loss, grads = _loss_and_grads(cfg, frozen, united, arrays, key, config, mesh)
    updates, state = _optimizer(config, cfg.d_model).update(grads, state, united)
    return cast(Stacked, optax.apply_updates(united, updates)), state, loss


@partial(jax.jit, static_argnames=("cfg", "config", "mesh"))
def _divergence(
    cfg: ModelConfig,
    united: Stacked,
    frozen: Frozen,
    arrays: Arrays,
    key: Array,
    config: DistillConfig,
    mesh: Mesh,
) -> Float[Array, ""]:
    return _loss_and_grads(cfg, frozen, united, arrays, key, config, mesh)[0]


class Progressing(NamedTuple):
    """Where a refinement stands; what a checkpoint holds."""

    united: Stacked
    state: Any
    step: int
    before: float  # divergence before the first step


def begin(united: dict[str, np.ndarray], config: DistillConfig, d_model: int) -> Progressing:
    """Returns the state before the first step, spread over the devices."""
    mesh = data_mesh()
    params = _united_over(mesh, united)
    init = _optimizer(config, d_model).init
    places = _placed(jax.eval_shape(init, params), mesh)
    return Progressing(params, jax.jit(init, out_shardings=places)(params), 0, math.nan)


def _united_over(mesh: Mesh, united: dict[str, np.ndarray]) -> Stacked:
    return jax.device_put(
        {name: np.asarray(leaf, np.float32) for name, leaf in united.items()},
        {name: NamedSharding(mesh, spec) for name, spec in _specs(united).items()},
    )


def _placed(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of each leaf; optimizer state is sharded as its parameter."""

    def place(path: Any, _: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return NamedSharding(mesh, UNITED_SPECS.get(names[-1], WHOLE) if names else WHOLE)

    return jax.tree_util.tree_map_with_path(place, tree)


def freeze(model: Model, groups: Int[np.ndarray, "L m"]) -> Frozen:
    """Returns the model's weights spread over the devices. Drop the model afterwards: it takes as
    much memory once more, where it lies.
    """
    mesh = data_mesh()
    slots = model.table.slots[:, : model.config.num_experts]
    experts = model.pool.plain().arrays
    frozen = Frozen(model.params, experts, slots, jnp.asarray(groups, jnp.int32))
    if jax.process_count() > 1:  # each gives its devices' parts of what lies on its host
        frozen = jax.tree.map(np.asarray, frozen)
    specs = frozen_specs(frozen)
    return jax.device_put(frozen, jax.tree.map(partial(NamedSharding, mesh), specs))


def refine(
    cfg: ModelConfig,
    frozen: Frozen,
    at: Progressing,
    data: Batch | Corpus,
    key: Array,
    config: DistillConfig,
    *,
    save: Callable[[Progressing], None],
    save_every: int = 100,
    note: Note = lambda done, total, losses: None,
) -> tuple[dict[str, np.ndarray], float, float]:
    """Returns united experts `[L, U, ...]` after `config.refine_steps`, and the divergence at both
    ends.

    Goes on from `at`, whose arrays it takes over; `save` is called every `save_every` steps. The
    batch and the randomness of a step depend on the step alone, so that a run that was interrupted
    ends like one that was not.

    Raises DistillError where the loss is not finite.
    """
    mesh = data_mesh()
    united, state = at.united, at.state

    def drawn(step: int) -> tuple[Arrays, Array]:
        return _batch(data, step, config, mesh), jax.random.fold_in(key, step)

    def checked(loss: Array, step: int) -> float:
        if not np.isfinite(value := float(loss)):
            raise DistillError(
                f"the end-to-end loss is {value} at step {step}: lower refine_learning_rate "
                f"({config.refine_rate(cfg.d_model):.2g} now)"
            )
        return value

    def tell(loss: Array, step: int) -> None:
        note(step + 1, config.refine_steps, {"divergence": checked(loss, step)})

    def held_out() -> float:
        loss = _divergence(cfg, united, frozen, *drawn(HELD_OUT), config, mesh)
        return checked(loss, HELD_OUT)

    before = at.before if at.step else held_out()
    losses = deque[Array]()  # of steps that were not told yet
    for step in range(at.step, config.refine_steps):
        united, state, loss = _step(cfg, united, state, frozen, *drawn(step), config, mesh)
        losses.append(loss)
        saving = (step + 1) % save_every == 0 and step + 1 < config.refine_steps
        # A loss is read when the step after it is on its way: the device does not wait for that.
        while len(losses) > (not saving and step + 1 < config.refine_steps):
            tell(losses.popleft(), step - len(losses))
        if saving:
            save(Progressing(united, state, step + 1, before))
    return on_host(united), before, held_out()


def held_out_by_file(
    cfg: ModelConfig,
    frozen: Frozen,
    united: dict[str, np.ndarray],
    data: Corpus,
    num_files: int,
    key: Array,
    config: DistillConfig,
) -> tuple[float, ...]:
    """Returns the divergence of united experts on the held-out rows that `refine` measures, over
    the texts of each data file; NaN of a file that has none there.
    """
    mesh = data_mesh()
    placed, own = _united_over(mesh, united), _rows(data, HELD_OUT, config)
    files = [
        np.array([-1, *map(int, of_row)])[items]
        for of_row, items in zip(own.families, own.items, strict=True)
    ]
    key = jax.random.fold_in(key, HELD_OUT)
    found = []
    for number in range(num_files):
        weights = own.weights * (np.stack(files) == number)
        of_file = math.nan
        if weights.any():  # of a thousand files, those of a few dozen rows
            arrays = _over(mesh, own, weights)
            of_file = float(_divergence(cfg, placed, frozen, arrays, key, config, mesh))
        found.append(of_file)
    return tuple(found)


def time_step(
    cfg: ModelConfig, frozen: Frozen, at: Progressing, data: Batch | Corpus, config: DistillConfig
) -> float:
    """Returns the seconds of one optimizer step of `refine`, over two that compile nothing."""
    mesh, key = data_mesh(), jax.random.key(config.seed)
    united, state, began = at.united, at.state, 0.0
    for step in range(3):
        began = time.perf_counter() if step == 1 else began
        arrays = _batch(data, step, config, mesh)
        united, state, _ = jax.block_until_ready(
            _step(cfg, united, state, frozen, arrays, key, config, mesh)
        )
    return (time.perf_counter() - began) / 2


def _batch(data: Batch | Corpus, step: int, config: DistillConfig, mesh: Mesh) -> Arrays:
    """Returns the rows of a step, spread over the devices."""
    own = _rows(data, step, config)
    return _over(mesh, own, own.weights)


def _over(mesh: Mesh, own: Batch, weights: Float[np.ndarray, "B S"]) -> Arrays:
    split = NamedSharding(mesh, PartitionSpec("data"))
    return jax.device_put((own.tokens, own.positions, own.items, weights), split)


def _rows(data: Batch | Corpus, step: int, config: DistillConfig) -> Batch:
    """Returns the rows of a step, evenly from each part of the data, whose last tenth only
    measures.
    """
    rng, numbers = np.random.default_rng([config.seed, step]), []
    parts = data.parts if isinstance(data, Corpus) else [range(len(data))]
    for at, part in enumerate(parts):
        count = (config.refine_rows + len(parts) - 1 - at) // len(parts)
        cut = part.start + max(1, len(part) - len(part) // 10)
        held_out = step == HELD_OUT and cut < part.stop
        low, high = (cut, part.stop) if held_out else (part.start, cut)
        numbers.append(rng.integers(low, high, count))
    return data.rows(np.concatenate(numbers))
