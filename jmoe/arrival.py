"""Models that join a family while others of it run, and leave it again (Multi-MoE).

A family has places, of which some may be vacant; nobody asks for what is in those. A model that
arrives is read into host memory as a whole; its experts then go into slots that no table names, a
few between two programs, and those that a model of the family stores byte for byte alike are that
model's. Programs, pool and all other models stay as they are. A place that a model has left points
to the first model's weights, and keeps none alive.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jmoe import checkpoint
from jmoe.api import Model, choose_ways
from jmoe.checkpoint import HFLayers
from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool, UnitedExperts, write_slots
from jmoe.family import Family, check_family
from jmoe.tokenizer import Tokenizer
from jmoe.weights import Params, PoolHolder, ResidentWeights, Weights

PIECE_BYTES = 16 << 20
"""Of experts that are written at once, so that no step waits for many."""


@dataclass(eq=False)
class Arrival:
    """A model in host memory, with the place and the slots that it is to have."""

    name: str
    path: Path
    number: int  # its place
    config: ModelConfig
    params: Params  # NumPy arrays
    united: dict[int, UnitedExperts]
    tokenizer: Tokenizer | None
    table: Int[np.ndarray, "layers columns"]
    pieces: deque[tuple[Int[np.ndarray, "n"], Pool]] = field(default_factory=deque)  # to write
    stamps: Mapping[Path, list[int]] = field(default_factory=dict)  # as of Model
    levels: Mapping[int, np.ndarray] = field(default_factory=dict)  # as `use_levels` takes them

    def write_piece(self, held: PoolHolder) -> None:
        """Writes a few experts into their slots, between two programs."""
        slots, experts = self.pieces.popleft()
        held.pool = write_slots(held.pool, jnp.asarray(slots), jax.tree.map(jnp.asarray, experts))

    def model(self, family: Family, params: Params) -> Model:
        """Returns the model, whose experts are in the pool; `params` are on the device."""
        first, held = family[0], family[0].resident.held
        groups = np.full(first.table.groups.shape, -1, np.int32)
        table = ExpertTable(jnp.asarray(self.table), jnp.asarray(groups))
        weights = Weights(params, held.pool, table)
        resident = ResidentWeights(weights, self.united, self.name, held=held)
        if self.levels:
            resident.use_levels(self.levels)
        own = self.name, self.path, self.config, first.dtype, resident, self.tokenizer
        return Model(*own, self.stamps)


def arrival_bytes(family: Family) -> tuple[int, int]:
    """Returns the most bytes that a further model takes on the device, beside the slots that there
    are, and in host memory while it is read.
    """
    first = family[0]
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(first.params))
    experts = first.config.num_moe_layers * first.config.num_experts * first.pool.slot_bytes
    united = sum(way.num_bytes for way in first.united.values())
    return params, params + experts + united


def read_arrival(
    family: Family,
    name: str,
    directory: str | Path,
    *,
    check_weights: bool = True,
    allow_unknown_config: Sequence[str] = (),
    revision: str = "",
    chat_template: str | Path = "",
) -> Arrival:
    """Reads a directory of the family's architecture for a vacant place; arguments as of
    `jmoe.load_family`. Nothing of the family changes, and no other model may come or go meanwhile.

    Raises ValueError where no place is vacant, where the pool has too few free slots for what no
    other model stores alike, and for a way that the model lacks; then as `load_family`.
    """
    if not family.vacant:
        raise ValueError(
            f"all {len(family)} places for models are taken; unload one first, or start with more "
            "(engine.spare_models)"
        )
    first = family[0]
    found, cfgs, tokenizers = check_family(
        {name: directory}, allow_unknown_config, revision, chat_template, first
    )
    stamps = checkpoint.file_stamps(found[name])
    path, kind, layers = found[name], first.dtype, first.config.num_moe_layers
    united = checkpoint.load_united(path, cfgs[name], kind if check_weights else None)
    files = HFLayers(
        path,
        cfgs[name],
        kind,
        check_weights,
        experts_on_host=True,
        params_on_host=True,
        quantize=first.pool.format,
    )
    slots, numbers = _slots(family, files, name)
    pieces: deque[tuple[np.ndarray, Pool]] = deque()

    def keep(moe_layer: int, experts: Pool) -> None:
        if jax.tree.structure(experts) != jax.tree.structure(first.pool):
            floats = jax.tree.map(jnp.asarray, experts).plain()
            experts = jax.tree.map(np.asarray, first.pool.kept(floats))
        own = slots[moe_layer, numbers[moe_layer]]
        size = _piece(family)
        for start in range(0, len(own), size):
            at = np.arange(start, start + size)
            at = np.where(at < len(own), at, start)  # filled up, so that one program writes all
            pieces.append((own[at], jax.tree.map(lambda leaf, at=at: leaf[at], experts)))

    params = checkpoint.read_layers(files, cfgs[name], None, keep, numbers, first.pool)
    number = min(family.vacant)
    count = first.resident.weights.num_united_slots
    behind = np.arange(layers * count, dtype=np.int32).reshape(layers, count)
    united_slots = family.routed_slots + number * layers * count + behind
    return Arrival(
        name,
        path,
        number,
        replace(first.config, eos_token_ids=cfgs[name].eos_token_ids),
        params,
        choose_ways(united, list(first.united), name),
        tokenizers[name],
        np.concatenate([slots, united_slots], axis=1),
        pieces,
        stamps,
    )


def compile_writes(family: Family) -> None:
    """Has the program compiled that writes a piece: it writes an expert to where it is."""
    held = family[0].resident.held
    slots = jnp.zeros(_piece(family), jnp.int32)
    held.pool = write_slots(held.pool, slots, held.pool.read(slots))


def _piece(family: Family) -> int:
    most = PIECE_BYTES // family[0].pool.slot_bytes
    return max(1, min(family.config.num_experts, most))


def _slots(
    family: Family, files: HFLayers, name: str
) -> tuple[Int[np.ndarray, "layers m"], list[list[int]]]:
    """Returns a slot for each routed expert of a model, and which of them are to be written, by
    layer. A model whose files are no longer those that its experts were read from has none alike.
    Raises ValueError where there are too few.
    """
    cfg = family.config
    shape = cfg.num_moe_layers, cfg.num_experts
    served = [model for at, model in enumerate(family) if at not in family.vacant]
    tables = np.stack([np.asarray(model.table.slots)[:, : cfg.num_experts] for model in served])
    stored = {
        at: HFLayers(model.path, model.config, model.dtype, False)
        for at, model in enumerate(served)
        if _is_as_read(model)
    }
    slots = np.full(shape, -1, np.int32)
    for moe_layer, layer in enumerate(np.flatnonzero(cfg.moe_layers).tolist()):
        for expert in range(cfg.num_experts):
            alike = (at for at in stored if files.same_expert(stored[at], layer, expert))
            if (at := next(alike, None)) is not None:
                slots[moe_layer, expert] = tables[at, moe_layer, expert]
    if not all(_is_as_read(served[at]) for at in stored):
        raise ValueError(f"files of a served model changed while {name} was read; load it again")
    own = slots < 0
    free = np.setdiff1d(np.arange(family.routed_slots, dtype=np.int32), tables)
    if own.sum() > len(free):
        raise ValueError(
            f"{name} has {own.sum()} experts that no served model stores alike, and {len(free)} of "
            f"the pool's {family.routed_slots} slots are free; unload a model first, or start with "
            "more (engine.spare_models)"
        )
    slots[own] = free[: own.sum()]
    return slots, [np.flatnonzero(layer).tolist() for layer in own]


def _is_as_read(model: Model) -> bool:
    return bool(model.stamps) and model.stamps == checkpoint.file_stamps(model.path)
