"""Notebook API: load a model, run it on whole sequences, generate through the paged cache."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool

from jmoe import checkpoint, display, layout, levels
from jmoe.attention import with_kv_cache_dtype
from jmoe.beside import digest_of
from jmoe.brownout import Brownout, Control
from jmoe.config import ModelConfig
from jmoe.experts import ExpertTable, Pool, UnitedExperts, num_united_slots
from jmoe.hub import locate
from jmoe.numbers import integer
from jmoe.packed import unpacked
from jmoe.parallel.home import Home, require_mesh
from jmoe.parallel.placement import Placement, check, contiguous
from jmoe.tokenizer import Tokenizer, TokenizerError, copy_tokenizer
from jmoe.weights import Params, ResidentWeights, Weights

BUNDLED = "bundled"
"""Stands for the model that comes with jmoe wherever a path is taken."""

DTYPES = ("bfloat16", "float16", "float32")

PlacementOf = Callable[..., Placement]
"""Called as `jmoe.parallel.placement.contiguous` is, with num_united."""

ExpertsOf = Callable[[int, int, int], Bool[np.ndarray, "layers E"]]
"""Called with the numbers of MoE layers, logical experts, and united ones among them."""


@dataclass(repr=False, eq=False)
class Model:
    """A loaded model: what it is. Only `resident` changes, when a way is loaded."""

    name: str
    path: Path
    config: ModelConfig
    dtype: jnp.dtype
    resident: ResidentWeights
    tokenizer: Tokenizer | None = None
    stamps: Mapping[Path, list[int]] = field(default_factory=dict)
    """`checkpoint.file_stamps` from before its weights were read; empty: not known."""

    @property
    def home(self) -> Home | None:
        """The mesh that it is spread over, and which expert is where; None: one device."""
        return self.resident.home

    @property
    def weights(self) -> Weights:
        """The weights on the device now."""
        return self.resident.weights

    @property
    def params(self) -> Params:
        """Everything but experts."""
        return self.weights.params

    @params.setter
    def params(self, params: Params) -> None:
        self._assign(params=params)

    @property
    def pool(self) -> Pool:
        """Weights of routed and united experts, by slot."""
        return self.weights.pool

    @pool.setter
    def pool(self, pool: Pool) -> None:
        self._assign(pool=pool)

    @property
    def table(self) -> ExpertTable:
        """Slots of logical experts, and groups."""
        return self.weights.table

    @table.setter
    def table(self, table: ExpertTable) -> None:
        self._assign(table=table)

    def _assign(self, **changed: Any) -> None:
        (name,) = changed
        words = f"assigning {name} is going: model.with_weights({name}=...) makes another model"
        warnings.warn(words, DeprecationWarning, stacklevel=3)
        self.resident.weights = self.weights._replace(**changed)

    @property
    def united(self) -> dict[int, UnitedExperts]:
        """United experts in host memory, by way."""
        return self.resident.united

    @property
    def way(self) -> int | None:
        """The way whose united experts are loaded; None: none, or not in every layer yet."""
        return self.resident.way

    def __repr__(self) -> str:
        cfg = self.config
        ways = f"ways {', '.join(map(str, self.united))}" if self.united else "no united experts"
        return (
            f"Model({display.cut(self.name, 60)!r}, {cfg.architecture}, {cfg.num_layers} layers, "
            f"{cfg.num_experts} experts, {cfg.experts_per_token} a token, "
            f"{display.count(self.num_parameters)} parameters, {self.dtype}, {ways})"
        )

    def _repr_html_(self) -> str:
        return display.table(self.name, self._described())

    def _described(self) -> list[tuple[str, str]]:
        """Returns the names and values of the notebook's table: geometry, memory, ways."""
        cfg = self.config
        num_united = cfg.num_moe_layers * self.num_united_slots
        routed, slot = self.pool.num_slots - num_united, self.pool.slot_bytes
        rest = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        host = sum(one.num_bytes for one in self.united.values())
        held = f"way {self.way}" if self.way else "none loaded"
        return [
            ("architecture", cfg.architecture),
            ("layers", f"{cfg.num_layers}, {cfg.num_moe_layers} of them MoE"),
            ("experts a layer", f"{cfg.num_experts}, {cfg.experts_per_token} a token"),
            ("d_model", f"{cfg.d_model:,}"),
            ("vocabulary", f"{cfg.vocab_size:,}"),
            ("positions", f"{cfg.max_position:,}"),
            ("parameters", f"{display.count(self.num_parameters)}, {self.dtype}"),
            ("memory, routed experts", display.size(routed * slot)),
            ("memory, slots of united experts", f"{display.size(num_united * slot)}; {held}"),
            ("memory, all other weights", display.size(rest)),
            ("ways at hand", ", ".join(map(str, self.united)) or "none"),
            ("host memory, united experts", display.size(host)),
        ]

    @property
    def num_parameters(self) -> int:
        """Elements of the model itself; united experts are not counted."""
        cfg = self.config
        routed = cfg.num_moe_layers * cfg.num_experts * layout.expert_parameters(cfg)
        return routed + sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def with_weights(self, **changed: Any) -> "Model":
        """Returns the same model with other `params`, `pool` or `table`, and no way loaded."""
        weights = self.weights._replace(**changed)
        resident = ResidentWeights(weights, self.united, self.name, self.home)
        return replace(self, resident=resident, stamps={})

    def with_kv_cache_dtype(self, dtype: str) -> "Model":
        """Returns the same model, with the same weights and ways, whose caches keep keys and values
        as `dtype` says; see `load`. Raises ValueError as that.
        """
        return replace(self, config=with_kv_cache_dtype(self.config, dtype))

    @property
    def num_united_slots(self) -> int:
        """United experts a layer has slots for."""
        return self.weights.num_united_slots

    @property
    def united_places(self) -> int:
        """`num_united_slots`, as it was called."""
        warnings.warn("united_places is num_united_slots now", DeprecationWarning, stacklevel=2)
        return self.num_united_slots

    def use_way(self, way: int) -> None:
        """Loads the united experts of `way`. Raises ValueError for one the model does not have."""
        self.resident.use_way(way)

    def load_way_layer(self, way: int, layer: int) -> None:
        """Loads one layer of a way; see `ResidentWeights.load_way_layer`."""
        self.resident.load_way_layer(way, layer)

    def united_of(self, way: int) -> UnitedExperts:
        """Returns the united experts of a way in host memory. Raises ValueError where there are
        none.
        """
        return self.resident.united_of(way)

    def config_under(self, brownout: Brownout | None) -> ModelConfig:
        """Returns the configuration that programs under a setting are made with: with a user's own
        strategy, it is another. Raises ValueError for one over a mesh.
        """
        own = None if brownout is None else brownout.own
        if own is not None and self.home is not None:
            raise ValueError(
                f"{self.name} is spread over a mesh, where devices agree on plans of zero, partial "
                f"and full brownout alone; load it without one for {own.name}"
            )
        return self.config if own is None else replace(self.config, strategy=own)

    def prepare(self, brownout: Brownout | None) -> Control:
        """Loads what a setting needs and returns it as a program takes it. Raises ValueError."""
        if not isinstance(brownout, Brownout | None):
            raise ValueError(f"brownout is {brownout!r}; give None or jmoe.Brownout(strategy, ...)")
        if brownout is not None and brownout.strategy not in ("zero", "full"):
            if brownout.way is not None:
                self.use_way(brownout.way)
            elif self.way is None and self.united:
                self.use_way(max(self.united))
            elif self.way is None and brownout.own is None:
                raise ValueError(f"partial brownout needs united experts; {self.name} has none")
        if self.resident.has_levels:
            raise ValueError(f"an engine serves {self.name} by levels; load it once more for this")
        keep = brownout.keep if brownout is not None and brownout.levels else None
        self.resident.set_levels(None if keep is None else self._levels(keep))
        return Control.of(brownout)

    def _levels(self, keep: str) -> np.ndarray:
        """Returns thresholds by layer of the way that is loaded. Raises ValueError as `levels.read`
        does, for a way without a table, and over a mesh.
        """
        if self.home is not None:
            raise ValueError(f"{self.name} is spread over a mesh, which knows no levels")
        layers = self.config.num_moe_layers
        tables = levels.read(self.path, layers, digest_of(self.path))
        if (table := tables.get((self.way or 0, keep))) is None:
            have = ", ".join(f"way {way} by {by}" for way, by in tables)
            raise ValueError(
                f"{self.path / levels.FILE} has levels of {have}, not of way {self.way} by {keep}"
            )
        return levels.by_code([table], layers)


def resolve(path: str | Path, revision: str = "", *, weights: bool = True) -> Path:
    """Returns the directory a path means: itself, or that of a model of the Hub, which is fetched
    first.

    `bundled` is the model that comes with jmoe. `revision` and `weights` as of `jmoe.hub.locate`.
    Raises HubError.
    """
    if str(path) == BUNDLED:
        return unpacked(Path(str(files("jmoe") / BUNDLED)))
    return locate(path, revision, weights=weights)


def name_of(path: str | Path) -> str:
    """Returns the name of a model: the last part of a directory's path, else the path as it is
    given.
    """
    return Path(path).absolute().name if Path(path).is_dir() else str(path)


def load(
    path: str | Path = BUNDLED,
    dtype: str = "bfloat16",
    *,
    ways: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
    check_weights: bool = True,
    allow_unknown_config: Sequence[str] = (),
    mesh: Mesh | None = None,
    placement: Placement | PlacementOf | None = None,
    revision: str = "",
    chat_template: str | Path = "",
    quantize: str = "auto",
    kv_cache_dtype: str = "auto",
    experts: ExpertsOf | None = None,
) -> Model:
    """Loads a Hugging Face directory as it stands, or one written by `save`.

    Args:
        path: the directory, `bundled`, or OWNER/NAME of a model of the Hugging Face Hub.
        dtype: `bfloat16`, `float16` or `float32`; weights are converted on the way.
        ways: united experts to keep at hand; None keeps all that lie beside the model. The pool
            gets slots for the largest of them.
        progress: called with (layers done, layers in all).
        check_weights: refuse NaN and infinity, also those that `dtype` makes of large weights.
        allow_unknown_config: keys of `config.json` that jmoe does not know and that change
            nothing; others it does not know are refused.
        mesh: spread the experts over its devices (`make_mesh`); None keeps all on one.
        placement: of all logical experts, for `mesh`; None gives each device a range of them. Or
            what makes it, called with the numbers of MoE layers, logical experts and devices, and
            `num_united=` of the experts.
        revision: branch, tag or commit of a model of the Hub; empty: its main branch.
        chat_template: a file, in place of the model's own template.
        quantize: `fp8` keeps experts in eight bits, with a scale for each block of 128 x 128
            weights; `int4` and `mxfp4` in four, in groups of 32, or as the files have them in that
            format; all other weights stay as `dtype` says, as do experts with `none`. `auto`: as
            the files have them, but `none` on a CPU, where each of these is slower.
        kv_cache_dtype: `fp8` keeps keys and values in eight bits, with a scale for each token and
            head; `auto`: in `dtype`.
        experts: says which routed experts to read, for who needs no others and has no mesh: slots
            of the rest stay zero. A model in jmoe's own format is read whole.

    Raises HubError, ConfigError, CheckpointError or TokenizerError, each naming what is wrong;
    ValueError for a placement that does not fit.
    """
    kind = check_dtype(dtype)
    directory, name = resolve(path, revision), name_of(path)
    tokenizer = Tokenizer.load(directory, chat_template)
    cfg = checkpoint.config_of(directory, allow_unknown_config=allow_unknown_config)
    cfg = with_kv_cache_dtype(cfg, kv_cache_dtype)
    cfg = with_tokenizer(cfg, tokenizer, directory)
    united = _united(directory, cfg, kind if check_weights else None, ways, name)
    num_united = num_united_slots(united)
    quantize = checkpoint.quantize_as(quantize, cfg)
    if checkpoint.is_native(directory):
        _, weights = checkpoint.load_native(directory, kind, check_weights)
        if num_united > weights.num_united_slots:
            raise ValueError(f"{name} was saved without slots for ways {sorted(united)}")
        home = _home(cfg, weights.num_united_slots, mesh, placement)
        if quantize != "none":
            pool = checkpoint.quantized(weights.pool.plain(), cfg, kind, quantize)
            weights = weights._replace(pool=pool)
        weights = weights if home is None else home.spread(weights)
    else:
        home = _home(cfg, num_united, mesh, placement)
        numbers = None
        if experts is not None:
            wanted = experts(cfg.num_moe_layers, cfg.num_experts + num_united, num_united)
            numbers = [np.flatnonzero(row[: cfg.num_experts]).tolist() for row in wanted]
        weights = checkpoint.load_hf(
            directory, cfg, kind, united, progress, check_weights, home, quantize, numbers
        )
    resident = ResidentWeights(weights, united, name, home)
    return Model(name, directory, cfg, kind, resident, tokenizer)


def _united(
    directory: Path,
    cfg: ModelConfig,
    finite: jnp.dtype | None,
    ways: Sequence[int] | None,
    name: str,
) -> dict[int, UnitedExperts]:
    """Returns the united experts to keep. Raises CheckpointError, and ValueError as
    `choose_ways`.
    """
    if ways is not None and not ways:
        return {}
    return choose_ways(checkpoint.load_united(directory, cfg, finite), ways, name)


def check_dtype(dtype: str) -> jnp.dtype:
    """Returns a dtype by its name. Raises ValueError for one that weights cannot have."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return jnp.dtype(dtype)


def _home(
    cfg: ModelConfig,
    num_united: int,
    mesh: Mesh | None,
    placement: Placement | PlacementOf | None,
) -> Home | None:
    """Returns where weights go. Raises ValueError for a placement that does not fit model and
    mesh.
    """
    if mesh is None:
        if placement is not None:
            raise ValueError("a placement was given, but no mesh; give both, or neither")
        return None
    require_mesh(mesh)
    shape = cfg.num_moe_layers, cfg.num_experts + num_united, mesh.size
    if placement is None:
        return Home(mesh, contiguous(*shape, num_united=num_united))
    if not isinstance(placement, Placement):
        placement = placement(*shape, num_united=num_united)
    if np.shape(placement.hosts) != shape:
        raise ValueError(
            f"placement.hosts is {np.shape(placement.hosts)}; this model on this mesh has "
            f"[MoE layers, logical experts, devices] = {shape}"
        )
    check(placement, int(np.max(placement.local)) + 1)
    return Home(mesh, placement)


def with_tokenizer(cfg: ModelConfig, tokenizer: Tokenizer | None, directory: Path) -> ModelConfig:
    """Returns `cfg` with the tokenizer's end of text among those that end an answer: a chat model's
    may stand there alone.

    Raises TokenizerError for a token that the model has no embedding for. The other way round is
    common: published models round `vocab_size` up.
    """
    if tokenizer is None:
        return cfg
    ids = {index: token for token, index in tokenizer.backend.get_vocab(True).items()}
    beyond = [index for index in ids if index >= cfg.vocab_size]
    if beyond:
        first = min(beyond)
        raise TokenizerError(
            f"{directory / 'tokenizer.json'} has token {ids[first]!r} with id {first}, the first "
            f"that the model lacks: the tokenizer's ids need a vocabulary of {max(beyond) + 1}, "
            f"and the model's vocab_size is {cfg.vocab_size}"
        )
    end = tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"])
    if end is None or end in cfg.eos_token_ids:
        return cfg
    return replace(cfg, eos_token_ids=(*cfg.eos_token_ids, end))


def choose_ways(
    found: dict[int, UnitedExperts], wanted: Sequence[int] | None, name: str
) -> dict[int, UnitedExperts]:
    """Returns the united experts of the wanted ways; None: all. Raises ValueError for a missing
    one.
    """
    if wanted is None:
        return found
    wanted = [integer("a way", way) for way in wanted]
    lacking = [way for way in wanted if way not in found]
    if lacking:
        have = ", ".join(map(str, found)) or "none"
        raise ValueError(f"ways are {wanted}; {name} has united experts for: {have}")
    return {way: found[way] for way in wanted}


def save(model: Model, path: str | Path) -> None:
    """Writes a model in jmoe's own format (Orbax), united experts and tokenizer included.

    `load` reads it back, over a plain pool; slots of united experts are saved as they are and reset
    on load. What is spread over a mesh is gathered in host memory, and saved as from one device.
    Raises FileExistsError where the directory already holds a model, ValueError for a mesh of
    several processes.
    """
    directory, home = Path(path), model.home
    weights = model.weights if home is None else home.gathered(model.weights)
    groups = jnp.full_like(weights.table.groups, -1)
    table = weights.table._replace(groups=groups)
    checkpoint.save_native(directory, model.config, weights._replace(table=table))
    copy_tokenizer(model.path, directory)
    if (model.path / checkpoint.UNITED_FILE).exists():
        checkpoint.copy_united(model.path, directory)
