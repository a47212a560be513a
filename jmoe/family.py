"""Several fine-tuned models over one pool of experts (Multi-MoE): a family, and loading one.

A model of a family is what any model is: parameters, and a table over the pool. The pool is the
same for all, and a slot may be in several tables. So whatever runs one model runs each of them,
with the same programs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from jmoe import checkpoint, display, layout
from jmoe.api import Model, check_dtype, choose_ways, resolve, with_tokenizer
from jmoe.attention import Paged
from jmoe.checkpoint import HFLayers
from jmoe.config import ConfigError, ModelConfig, read_config
from jmoe.experts import ExpertPool, ExpertTable, Pool, UnitedExperts, num_united_slots, write_slots
from jmoe.numbers import integer
from jmoe.offloaded import Expert, Homes, OffloadedExperts, OnHost, check_spare, needed_by_a_row
from jmoe.parallel.home import Home, require_mesh
from jmoe.parallel.placement import Placement, check, of_tables
from jmoe.residuals import ByDifference, read_residuals
from jmoe.sharing import (
    MERGED,
    WEIGHTS_FILE,
    Sharing,
    SharingError,
    merged_name,
    read_sharing,
)
from jmoe.tokenizer import Tokenizer
from jmoe.weights import Params, PoolHolder, ResidentWeights, Weights

MAY_DIFFER = frozenset({"eos_token_ids"})
"""Of a configuration, what programs do not depend on."""

Progress = Callable[[int, int], None] | None
"""`(layers done, layers in all)`."""
Fits = Callable[[int, int], None]
"""`(slots of each device's pool, bytes of a slot)`; raises where they do not fit."""


@dataclass(repr=False, eq=False)
class Family(Sequence[Model]):
    """Models of one architecture over one pool, in the order in which they were named. Only which
    model is at a place changes, and only where models may come and go (`jmoe.arrival`).
    """

    models: tuple[Model, ...]
    sharing: Sharing
    offloaded: OffloadedExperts | None = None  # experts without a slot for good
    routed_slots: int = 0  # of the pool, for models that come and go; 0: none do
    vacant: frozenset[int] = frozenset()  # places without a model, which stand for the first
    spread: "Spread | None" = None  # over a mesh; None: on one device, or a model by itself

    @classmethod
    def of(cls, model: "Model | Family") -> "Family":
        """Returns a model as a family of one; a family as it is."""
        if isinstance(model, Family):
            return model
        cfg = model.config
        return cls((model,), Sharing.none((model.name,), cfg.num_moe_layers, cfg.num_experts))

    @property
    def config(self) -> ModelConfig:
        """The common configuration; end-of-sequence tokens are those of the first model."""
        return self.models[0].config

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models, by place; empty where it is vacant."""
        return tuple("" if at in self.vacant else one.name for at, one in enumerate(self.models))

    @property
    def home(self) -> Home | None:
        """Where the distinct experts of all models lie over a mesh; None: on one device."""
        return self.models[0].home if self.spread is None else self.spread.home

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """Gives the experts of one MoE layer of `home` other hosts, between two programs; a copy
        serves all models that share the expert. Raises ValueError as `ResidentWeights.host_layer`.
        """
        if self.spread is None:
            self.models[0].resident.host_layer(layer, hosts)
            return
        held, spread = self.models[0].resident.held, self.spread
        spread.home, held.pool = spread.home.host_layer(held.pool, layer, hosts)
        for model, own in zip(self.models, spread.numbers, strict=True):
            model.resident.use_home(spread.home.part(own), own)

    def put(self, number: int, model: Model | None) -> None:
        """Puts a model at a place, between two programs; None: what was there leaves."""
        models = list(self.models)
        models[number] = model or models[0]
        self.models = tuple(models)
        self.vacant = (self.vacant | {number}) if model is None else (self.vacant - {number})

    @property
    def weight_bytes(self) -> int:
        """Bytes on the device of the pool, of differences from it, and of all other weights; what
        two models share counts once.
        """
        trees = [self.models[0].pool, [(model.params, model.table) for model in self]]
        leaves = {id(leaf): leaf for leaf in jax.tree.leaves(trees)}
        offloaded = 0 if self.offloaded is None else self.offloaded.source.device_bytes
        return sum(leaf.nbytes for leaf in leaves.values()) + offloaded

    def fetch(self, experts: Mapping[Expert, int]) -> None:
        """Puts offloaded experts into spare slots, each into its own, between two programs."""
        assert self.offloaded is not None
        residents = {number: model.resident for number, model in enumerate(self.models)}
        self.offloaded.fetch(experts, self.models[0].resident.held, residents)

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, number: Any) -> Any:
        """Returns a model by its number."""
        return self.models[number]

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models)

    def __repr__(self) -> str:
        cfg = self.config
        own = len(self) * cfg.num_moe_layers * cfg.num_experts
        return (
            f"Family({', '.join(self.names)}: {cfg.architecture}, {self.sharing.num_slots} routed "
            f"experts for {own} positions, {self.sharing.shared_percent:.0f} % shared)"
        )

    def _repr_html_(self) -> str:
        cfg, pool = self.config, self.models[0].pool
        rows = [
            ("models", ", ".join(self.names)),
            ("architecture", cfg.architecture),
            ("routed experts", f"{self.sharing.num_slots:,} slots for {len(self)} models"),
            ("shared", f"{self.sharing.shared_percent:.0f} % of what could be"),
            ("memory, pool", display.size(pool.num_slots * pool.slot_bytes)),
            ("memory, all weights", display.size(self.weight_bytes)),
        ]
        return display.table("family", rows)


def load_family(
    directories: Mapping[str, str | Path],
    sharing: str | Path | Sharing | None = None,
    dtype: str = "bfloat16",
    *,
    ways: Sequence[int] | None = None,
    progress: Progress = None,
    check_weights: bool = True,
    allow_unknown_config: Sequence[str] = (),
    params_on_host: bool = False,
    resident_experts: int = 0,
    spare_experts: int = 0,
    revision: str = "",
    chat_template: str | Path = "",
    quantize: str = "auto",
    spare_models: int = 0,
    mesh: Mesh | None = None,
    fits: Fits = lambda num_slots, slot_bytes: None,
    placement: Callable[[Placement], Placement] | None = None,
) -> Family:
    """Loads Hugging Face directories of one architecture into one pool.

    Args:
        directories: by the models' names, in order; the first is the default of whoever names none.
        sharing: `family.json` of `jmoe consolidate`, or the map itself; None: models share the
            experts of one position that their files have byte for byte alike.
        dtype: as for `jmoe.load`, likewise the arguments that follow.
        ways: united experts to keep at hand; None keeps those that every model has, its own or by
            `sharing` another's, which are in host memory and in the pool once.
        progress: called with (layers done, layers of all models).
        check_weights: as for `jmoe.load`.
        allow_unknown_config: as for `jmoe.load`.
        params_on_host: leave all but experts in host memory, for who puts some models' sets of them
            onto the device at a time; such a model's `params` are NumPy arrays.
        resident_experts: distinct routed experts on the device for good, 0: all; the others stay
            in host memory, and a sibling's serves in their place (`jmoe.offloaded`), as for experts
            that `sharing` knows by their difference from a sibling's.
        spare_experts: slots that those can be fetched into; 0: they never are.
        revision: branch, tag or commit of each model of the Hub; empty: its main branch.
        chat_template: a file, in place of every model's own template.
        quantize: as for `jmoe.load`.
        spare_models: further places, with slots for all experts of as many models that come later.
        mesh: spread the pool over its devices (`jmoe.make_mesh`), each model's experts evenly; None
            keeps all on one.
        fits: called with the slots of each device's pool and the bytes of one, before the pool is
            made; raises where they do not fit.
        placement: called with where the distinct experts of all models lie over `mesh`, each once
            (`jmoe.parallel.placement.of_tables`), and returns where they are to lie, such as with
            slots for copies (`with_spare`). None: as they lie.

    A tensor beside the experts that is equal in two models is on the device once.

    Raises, before any weights are read, ValueError for no directories, a way that one lacks, no
    united experts to lend, fewer resident experts than one model has, fewer spare slots than a row
    can need or some that nothing would be fetched into, a mesh beside weights that lie in host
    memory, experts known by differences or models that come later, a placement without a mesh or
    one that does not fit, ConfigError for models that are not of one architecture and vocabulary,
    SharingError for a map of other models, and what `fits` raises; then as `jmoe.load`.
    """
    kind = check_dtype(dtype)
    elsewhere = {
        "params_on_host": params_on_host,
        "resident_experts": resident_experts,
        "spare_models": spare_models,
    }
    if mesh is not None:
        require_mesh(mesh)
    elif placement is not None:
        raise ValueError("a placement was given, but no mesh; give both, or neither")
    if mesh is not None and (given := [key for key, value in elsewhere.items() if value]):
        raise ValueError(
            f"{given[0]} is {elsewhere[given[0]]}, and a mesh is given: what is spread over it "
            "is all there, and no model comes later; leave one of them out"
        )
    comes_and_goes = sharing is None and not resident_experts and mesh is None
    spare_models = integer("spare_models", spare_models)
    if spare_models and not comes_and_goes:
        raise ValueError(
            f"spare_models is {spare_models}; models come and go in a family without a map of "
            "shared experts and with all experts on the device"
        )
    resident_experts = integer("resident_experts", resident_experts)
    spare_experts = integer("spare_experts", spare_experts)
    found, cfgs, tokenizers = check_family(
        directories, allow_unknown_config, revision, chat_template
    )
    cfg = next(iter(cfgs.values()))
    quantize = checkpoint.quantize_as(quantize, cfg)
    shape = cfg.num_moe_layers, cfg.num_experts
    if isinstance(sharing, str | Path):
        sharing = read_sharing(Path(sharing), found, shape)
    elif sharing is not None and (
        sharing.names != tuple(found) or sharing.owners.shape[1:] != shape
    ):
        raise SharingError(
            f"the map of shared experts is of {', '.join(sharing.names)}, {sharing.owners.shape}; "
            f"those to load are {', '.join(found)}, {(len(found), *shape)}"
        )
    if mesh is not None and sharing is not None and sharing.differs.any():
        raise ValueError(
            "a mesh is given, and this family's map knows experts by their difference from others, "
            "which one device makes as a row asks for them; leave the mesh out"
        )
    names = tuple(found)
    lenders = range(len(found)) if sharing is None else sharing.lenders
    lent = {name: names[at] for name, at in zip(found, lenders, strict=True)}
    finite = kind if check_weights else None
    own = {n: checkpoint.load_united(found[n], cfg, finite) for n in found if lent[n] == n}
    lent_ways = () if sharing is None or not sharing.united else sharing.united_ways
    united = _common_ways(own, lent, ways, lent_ways)
    stamps = {name: checkpoint.file_stamps(path) for name, path in found.items()}
    opened = partial(
        HFLayers,
        params_on_host=params_on_host,
        experts_on_host=mesh is not None,
        quantize=quantize,
    )
    files = {n: opened(path, cfg, kind, check_weights) for n, path in found.items()}
    sharing = sharing or stored_alike(files, cfg)
    homes = Homes.of(sharing, resident_experts, spare_experts)
    if spare_experts:
        check_spare(spare_experts, needed_by_a_row(homes.users, cfg.experts_per_token))
    held_experts = sharing.slots()[1]
    num_united = num_united_slots(next(iter(united.values())))
    routed_slots = homes.num_slots + spare_models * cfg.num_moe_layers * cfg.num_experts
    tables = _tables(homes, num_united, lenders, routed_slots)
    num_places = len(united) + spare_models
    like = next(iter(files.values())).like()
    if mesh is None:
        num_slots = routed_slots + num_places * cfg.num_moe_layers * num_united
        fits(num_slots, like.slot_bytes)
        spread, held = None, PoolHolder(like.empty(num_slots))
    else:
        spread = Spread.over(mesh, tables, placement)
        fits(spread.home.num_slots, like.slot_bytes)
        tables, held = spread.tables(cfg.num_experts), PoolHolder(spread.home.empty_pool(like))
    reader = _Reader(held, held_experts, homes, cfg, spread)
    if (sharing.owners == MERGED).any():
        _write_merged(reader, sharing, kind, check_weights)
    params: list[Params] = []
    for number, name in enumerate(names):
        done = _counted_on(progress, number, len(found))
        placed = (lambda leaf: leaf) if spread is None else spread.home.whole
        params.append(_shared_leaves(reader.read(files[name], number, done), params, placed))
    residents: dict[int, ResidentWeights] = {}
    for number in sorted(range(len(names)), key=lambda at: lenders[at] != at):  # lenders first
        weights, lender = Weights(params[number], held.pool, tables[number]), lenders[number]
        home = None if spread is None else spread.home.part(spread.numbers[number])
        residents[number] = ResidentWeights(
            weights, united[names[lender]], names[number], home, held, residents.get(lender)
        )
    models = [
        Model(
            name, found[name], cfgs[name], kind, residents[number], tokenizers[name], stamps[name]
        )
        for number, name in enumerate(names)
    ]
    offloaded = None
    if homes.offloaded is not None:
        source = OnHost(reader.on_host)
        if sharing.differs.any():
            experts = sorted(homes.users)
            number = {expert: at for at, expert in enumerate(experts)}
            residuals = read_residuals(sharing, experts, cfg, check_weights)
            source = ByDifference(residuals, number, homes.substitute)
        offloaded = OffloadedExperts(homes.spare, source, homes.users, homes.substitute)
    return Family(
        (*models, *models[:1] * spare_models),
        sharing,
        offloaded,
        routed_slots if comes_and_goes else 0,
        frozenset(range(len(models), num_places)),
        spread,
    )


def check_family(
    directories: Mapping[str, str | Path],
    allow_unknown_config: Sequence[str] = (),
    revision: str = "",
    chat_template: str | Path = "",
    beside: Model | None = None,
) -> tuple[dict[str, Path], dict[str, ModelConfig], dict[str, Tokenizer | None]]:
    """Returns directories, configurations and tokenizers, by name, of models that can share one
    pool, with `beside` too, a loaded model whose files may be others by now.

    Reads no weights; fetches those of models of the Hub. Raises HubError, ValueError and
    ConfigError as `load_family`, TokenizerError for a tokenizer that does not fit its model.
    """
    found = _directories(directories, revision)
    cfgs = {name: _config(path, tuple(allow_unknown_config)) for name, path in found.items()}
    known, own = {}, {}
    if beside is not None:  # whose cache may be in eight bits, and its strategy a user's own
        cfg, own = beside.config, {beside.name: beside.tokenizer}
        kinds = (replace(k, fp8=False) if type(k) is Paged else k for k in cfg.layer_attention)
        known = {beside.name: replace(cfg, layer_attention=tuple(kinds), strategy=None)}
    _check_architecture(known | cfgs)
    tokenizers = {name: Tokenizer.load(path, chat_template) for name, path in found.items()}
    cfgs = {name: with_tokenizer(cfg, tokenizers[name], found[name]) for name, cfg in cfgs.items()}
    _check_vocabularies(own | tokenizers)
    return found, cfgs, tokenizers


def stored_alike(files: Mapping[str, HFLayers], cfg: ModelConfig) -> Sharing:
    """Returns the map in which models share what they store byte for byte alike, as fine-tunes of
    other weights than the experts do.
    """
    sharing = Sharing.none(tuple(files), cfg.num_moe_layers, cfg.num_experts)
    models, layers = list(files.values()), np.flatnonzero(cfg.moe_layers).tolist()
    for (number, own), (at, layer) in product(enumerate(models), enumerate(layers)):
        for expert in range(cfg.num_experts):
            same = (i for i in range(number) if own.same_expert(models[i], layer, expert))
            sharing.owners[number, at, expert] = next(same, number)
    return sharing


def _counted_on(tell: Progress, number: int, count: int) -> Progress:
    """Returns progress in layers that is counted on from those of the models before."""
    return tell and (lambda done, total: tell(number * total + done, count * total))


def _directories(directories: Mapping[str, str | Path], revision: str) -> dict[str, Path]:
    if not directories:
        raise ValueError("no directory is named; give the models of a family as {name: directory}")
    for name in directories:
        if not name or name != name.strip() or not name.isprintable():
            raise ValueError(
                f"a model's name is {name!r}; it must be printable, and neither empty nor begin or "
                "end with space"
            )
    return {name: resolve(path, revision) for name, path in directories.items()}


def _config(path: Path, allowed: Sequence[str]) -> ModelConfig:
    if checkpoint.is_native(path):
        raise ConfigError(
            f"{path} is in jmoe's own format; a family is made of Hugging Face directories"
        )
    return read_config(path, allow_unknown_config=allowed)


def _check_architecture(cfgs: Mapping[str, ModelConfig]) -> None:
    """Raises ConfigError for models that differ in what programs depend on."""
    (first, cfg), *others = cfgs.items()
    for name, other in others:
        differing = [
            f"{each.name} is {getattr(other, each.name)} and {getattr(cfg, each.name)}"
            for each in fields(cfg)
            if each.name not in MAY_DIFFER and getattr(other, each.name) != getattr(cfg, each.name)
        ]
        if differing:
            raise ConfigError(
                f"{name} and {first} are not of one architecture, as models over one pool have to "
                f"be: {'; '.join(differing)}. Serve {name} by itself"
            )


def _check_vocabularies(tokenizers: Mapping[str, Tokenizer | None]) -> None:
    """Raises ConfigError where one text means other tokens to two models, but for tokens that one
    has beyond the other's.
    """
    first, known = "", {}
    for name, tokenizer in tokenizers.items():
        if tokenizer is None:
            continue
        own = tokenizer.backend.get_vocab(True)
        if not first:
            first, known = name, own
        other = next((t for t in own if t in known and own[t] != known[t]), None)
        if other is not None:
            raise ConfigError(
                f"{name} and {first} do not have one vocabulary, as models over one pool have to: "
                f"{other!r} is token {own[other]} of {name} and {known[other]} of {first}. Serve "
                f"{name} by itself"
            )


def _common_ways(
    found: Mapping[str, dict[int, UnitedExperts]],
    lent: Mapping[str, str],
    wanted: Sequence[int] | None,
    lent_ways: Sequence[int],
) -> dict[str, dict[int, UnitedExperts]]:
    """Returns the united experts of each model that uses its own: those of `wanted` ways, or of all
    that every one of them has. `lent` says whose united experts a model uses, and `lent_ways` of
    which ways, if not of any.
    """
    for name, lender in lent.items():
        if name != lender and not found[lender]:
            raise ValueError(
                f"{name} is to use the united experts of {lender}, which has none; make some with "
                "`jmoe distill`, or take a map in which each model uses its own"
            )
    if lent_ways and not set(wanted or ()) <= set(lent_ways):
        raise ValueError(
            f"ways are {list(wanted or ())}; by this family's map united experts are lent of ways "
            f"{', '.join(map(str, lent_ways))} alone, for which the loss was measured"
        )
    if wanted is None and lent_ways:
        wanted = lent_ways
    if wanted is None:
        everyone = set.intersection(*(set(ways) for ways in found.values()))
        wanted = [way for way in next(iter(found.values())) if way in everyone]
    return {name: choose_ways(ways, wanted, name) for name, ways in found.items()}


def table_slots(
    routed: Int[np.ndarray, "N layers m"], lenders: Sequence[int], num_united: int, first: int
) -> Int[np.ndarray, "N layers E"]:
    """Returns the slots of each model's table: `routed`, and from `first` on those of united
    experts, its own or its lender's.
    """
    layers, places = routed.shape[1], {one: at for at, one in enumerate(sorted(set(lenders)))}
    own = np.arange(len(places) * layers * num_united, dtype=np.int32) + first
    own = own.reshape(len(places), layers, num_united)
    return np.concatenate([routed, own[[places[lender] for lender in lenders]]], axis=2)


def _tables(homes: Homes, num_united: int, lenders: Sequence[int], first: int) -> list[ExpertTable]:
    """Returns a table for each model."""
    groups = jnp.full(homes.routed.shape[1:], -1, jnp.int32)
    gone = [None] * len(lenders) if homes.offloaded is None else map(jnp.asarray, homes.offloaded)
    slots = table_slots(homes.routed, lenders, num_united, first)
    return [
        ExpertTable(jnp.asarray(own), groups, offloaded=away)
        for own, away in zip(slots, gone, strict=True)
    ]


@dataclass(eq=False)
class Spread:
    """Where the experts of a family lie over a mesh."""

    home: Home  # of the distinct experts of all models, numbered in each layer
    own: Bool[np.ndarray, "layers E D"]  # each one's own device, without copies
    numbers: Int[np.ndarray, "N layers e"]  # of each model's logical experts
    number: Int[np.ndarray, "slots"]  # of what would lie in that slot of one device

    @classmethod
    def over(
        cls,
        mesh: Mesh,
        tables: Sequence[ExpertTable],
        placement: Callable[[Placement], Placement] | None,
    ) -> "Spread":
        """Places what lies in these tables of one device. Raises ValueError for a `placement` of
        one's own that does not fit.
        """
        slots = np.stack([np.asarray(table.slots) for table in tables])
        placed, numbers = of_tables(slots, tables[0].groups.shape[1], mesh.size)
        number = np.zeros(slots.max() + 1, np.int32)
        number[slots] = numbers
        own = np.asarray(placed.hosts)
        if placement is not None:
            placed = placement(placed)
            if np.shape(placed.hosts) != own.shape:
                raise ValueError(
                    f"placement.hosts is {np.shape(placed.hosts)}; this family on this mesh has "
                    f"[MoE layers, distinct experts, devices] = {own.shape}"
                )
            check(placed, int(np.max(placed.local)) + 1)
        return cls(Home(mesh, placed), own, numbers, number)

    def tables(self, num_experts: int) -> list[ExpertTable]:
        """Returns each model's table."""
        return [self.home.part(own).table(num_experts, own) for own in self.numbers]


@dataclass
class _Reader:
    """Reads models of a family; experts that any model uses go to their slots or to host memory."""

    held: PoolHolder
    held_experts: Int[np.ndarray, "slots 3"]
    homes: Homes
    cfg: ModelConfig
    spread: Spread | None = None  # None: on one device
    on_host: dict[Expert, Pool] = field(default_factory=dict)  # in the kind of the pool

    def read(self, files: HFLayers, number: int, progress: Progress) -> Params:
        """Returns a model's parameters. Raises CheckpointError."""
        owner, layer, _ = self.held_experts.T
        at = [
            np.flatnonzero((owner == number) & (layer == moe_layer))
            for moe_layer in range(self.cfg.num_moe_layers)
        ]
        numbers = [self.held_experts[own, 2].tolist() for own in at]

        def write(moe_layer: int, experts: Pool) -> None:
            self.write(at[moe_layer], experts)

        like = self.held.pool
        return checkpoint.read_layers(files, self.cfg, progress, write, numbers, like)

    def write(self, at: Int[np.ndarray, "n"], experts: Pool) -> None:
        """Writes experts of one layer, which are at these places among `held_experts`."""
        slots = self.homes.slot[at]
        if self.spread is not None:
            layer, numbers = int(self.held_experts[at[0], 1]), self.spread.number[slots]
            on_host = jax.tree.map(np.asarray, experts)
            self.held.pool = self.spread.home.write(self.held.pool, layer, on_host, numbers)
            return
        if len(at) == self.cfg.num_experts and (slots >= 0).all():
            self.held.pool = write_slots(self.held.pool, jnp.asarray(slots), experts)
            return
        if jax.tree.structure(experts) != jax.tree.structure(self.held.pool):
            experts = self.held.pool.kept(experts.plain())
        parts = jax.tree.map(np.asarray, experts)
        for place, slot in enumerate(slots):  # one by one: every number of them would be a program
            one = parts.read(np.array([place]))
            if slot < 0:
                owner, layer, expert = self.held_experts[at[place]].tolist()
                self.on_host[owner, layer, expert] = one
                continue
            self.held.pool = write_slots(self.held.pool, jnp.asarray(slot[None]), one)


def _write_merged(reader: _Reader, sharing: Sharing, dtype: jnp.dtype, check_weights: bool) -> None:
    """Writes merged experts into the pool. Raises CheckpointError."""
    cfg = reader.cfg
    if sharing.directory is None:
        raise SharingError("the map has merged experts, and no directory that holds them")
    path, shapes = sharing.directory / WEIGHTS_FILE, layout.expert_shapes(cfg)
    with checkpoint.reading(path) as file:
        for at in np.flatnonzero(reader.held_experts[:, 0] == MERGED):
            _, layer, expert = reader.held_experts[at].tolist()
            found = {}
            for key, shape in shapes.items():
                name = merged_name(layer, expert, key)
                read = checkpoint.checked_tensor(file, path, name, shape, dtype, check_weights)
                found[key] = jnp.asarray(read[None])
            reader.write(np.array([at]), ExpertPool(**found))


def _shared_leaves(
    params: Params, others: Sequence[Params], placed: Callable[[Any], Any]
) -> Params:
    """Returns `params` with the arrays of others where those are equal, and its own as `placed`."""

    def shared(leaf: Any, *same: Any) -> Any:
        found = next((other for other in same if _equal(leaf, other)), None)
        return placed(leaf) if found is None else found

    return jax.tree.map(shared, params, *others)


def _equal(one: Any, other: Any) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))
