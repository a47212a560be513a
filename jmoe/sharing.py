"""Which experts the models of a family share, and `family.json`, which keeps it.

Models of one architecture that were fine-tuned from one another have experts at the same positions,
(MoE layer, expert). Where two models share one, a single slot of the pool serves both. The map lies
over the models' directories as they stand; only merged experts, and differences from shared ones,
are weights of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from jmoe.checkpoint import weights_digest

FORMAT = "jmoe-family-2"
_SAMPLED = "jmoe-family-1"
MERGED = -1
"""As an owner: no model's expert, but the merged one of its position, in `WEIGHTS_FILE`."""
WEIGHTS_FILE = "family.safetensors"
"""Beside `family.json`, with merged experts as `layers.{i}.experts.{e}.gate_up [d, 2 f]` and
`.down [f, d]`, i counting MoE layers; and with differences (`jmoe.residuals.tensor_name`)."""


def merged_name(layer: int, expert: int, key: str) -> str:
    """Returns the name of a merged expert's tensor in WEIGHTS_FILE; `key` is a field of
    ExpertPool.
    """
    return f"layers.{layer}.experts.{expert}.{key}"


class SharingError(ValueError):
    """A map of shared experts that cannot be used; says which value is wrong and what would do."""


@dataclass(frozen=True, eq=False)
class Sharing:
    """Whose expert serves at each position of each model.

    `owners[i, l, e]` is the model whose expert computes what model i routes to expert e of MoE
    layer l: i itself where the expert is its own, `MERGED` for a merged one.
    """

    names: tuple[str, ...]
    owners: Int[np.ndarray, "N layers m"]
    fingerprints: tuple[str, ...] = ()  # `weights_digest` of each model; empty: not known
    facts: Mapping[str, Any] = field(default_factory=dict)  # how it was made, for people
    directory: Path | None = None  # where merged experts and differences lie
    residual_rank: int = 0
    """Where a model uses another's expert, it knows its own by a difference of this rank; 0: it is
    gone."""
    united: tuple[int, ...] = ()
    """The model whose united experts each model uses: itself, or one that uses its own; empty: each
    uses its own."""
    united_ways: tuple[int, ...] = ()
    """Ways that the family is served with where `united` lends some; empty: any."""

    def __post_init__(self) -> None:
        """Raises SharingError for owners that are none of the models, and for united experts of one
        that has none of its own.
        """
        count, found = len(self.names), self.owners
        if found.ndim != 3 or len(found) != count:
            raise SharingError(
                f"owners have the shape {found.shape}; {count} models take "
                f"[{count}, MoE layers, experts]"
            )
        if found.size and not MERGED <= found.min() <= found.max() < count:
            raise SharingError(
                f"owners are {found.min()} to {found.max()}; they must be numbers of the {count} "
                f"models, 0 to {count - 1}, or {MERGED} for a merged expert"
            )
        lend = self.united
        if lend and not (
            len(lend) == count and all(0 <= at < count and lend[at] == at for at in lend)
        ):
            raise SharingError(
                f"united is {list(lend)}; it must have, for each of the {count} models, the number "
                "of one that uses united experts of its own, such as itself"
            )

    @classmethod
    def none(cls, names: Sequence[str], num_layers: int, num_experts: int) -> "Sharing":
        """Makes a map in which every model has all experts for itself."""
        own = np.arange(len(names), dtype=np.int32)[:, None, None]
        return cls(tuple(names), np.tile(own, (1, num_layers, num_experts)))

    @property
    def differs(self) -> Bool[np.ndarray, "N layers m"]:
        """Where a model knows its own expert by a difference from the one it shares."""
        own = np.arange(len(self.names))[:, None, None]
        return (self.owners != own) & bool(self.residual_rank)

    @property
    def lenders(self) -> tuple[int, ...]:
        """The model whose united experts each model uses."""
        return self.united or tuple(range(len(self.names)))

    @property
    def num_slots(self) -> int:
        """Routed experts that the pool holds: the distinct owners of each position."""
        return sum(int((self.owners == owner).any(axis=0).sum()) for owner in self._all_owners)

    @property
    def shared_percent(self) -> float:
        """Percentage of the slots that sharing can save that are saved; 100: one slot a
        position.
        """
        count, *position = self.owners.shape
        positions = int(np.prod(position))
        if count == 1 or not positions:
            return 0.0
        return 100 * (count * positions - self.num_slots) / ((count - 1) * positions)

    def slots(self) -> tuple[Int[np.ndarray, "N layers m"], Int[np.ndarray, "slots 3"]]:
        """Returns a slot for each distinct expert: of each position of each model; and what each
        slot holds, as (owner, layer, expert). A layer's slots lie together.
        """
        found = np.empty_like(self.owners)
        held: list[tuple[int, int, int]] = []
        for layer in range(self.owners.shape[1]):
            for owner in self._all_owners:
                users = self.owners[:, layer] == owner
                for expert in np.flatnonzero(users.any(axis=0)).tolist():
                    found[users[:, expert], layer, expert] = len(held)
                    held.append((owner, layer, expert))
        return found, np.array(held, np.int32).reshape(-1, 3)

    @property
    def _all_owners(self) -> range:
        return range(MERGED, len(self.names))


def write_sharing(path: Path, sharing: Sharing) -> None:
    """Writes `family.json`, a layer of a model a line. Raises OSError."""
    identities = [
        {"name": name, "fingerprint": print_}
        for name, print_ in zip(sharing.names, sharing.fingerprints, strict=True)
    ]
    models = [
        "  [\n   " + ",\n   ".join(json.dumps(layer) for layer in model) + "\n  ]"
        for model in sharing.owners.tolist()
    ]
    head: dict[str, Any] = {"format": FORMAT, "models": identities, "facts": dict(sharing.facts)}
    if sharing.residual_rank:
        head["residual_rank"] = sharing.residual_rank
    if sharing.united:
        head["united"] = {"of": list(sharing.united), "ways": list(sharing.united_ways)}
    text = json.dumps(head, indent=1).removesuffix("\n}")
    path.write_text(text + ',\n "owners": [\n' + ",\n".join(models) + "\n ]\n}\n", encoding="utf-8")


def lends_united(path: Path) -> bool:
    """Returns whether `family.json` has a model use another's united experts. Nothing is checked:
    of a file that is none, it does not.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return bool(raw.get("united"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def read_sharing(path: Path, directories: Mapping[str, Path], shape: tuple[int, int]) -> Sharing:
    """Returns the map of a family that is served as `directories` say, in their order.

    `shape` is the models' (MoE layers, experts). Models are known by what their directories hold,
    whatever they are called. Raises SharingError for a file that is none, of other models, or of
    another shape.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] == _SAMPLED:
            raise SharingError(
                f"{path} is of an older jmoe, which knew a model by samples of its weights alone; "
                "run `jmoe consolidate` again"
            )
        if raw["format"] != FORMAT:
            raise ValueError(f"its format is {raw['format']!r}, not {FORMAT!r}")
        prints = [str(model["fingerprint"]) for model in raw["models"]]
        names = [str(model["name"]) for model in raw["models"]]
        owners = np.array(raw["owners"])
        if owners.dtype.kind != "i":
            raise ValueError("owners are no table of integers")
        facts, rank = dict(raw.get("facts", {})), raw.get("residual_rank", 0)
        if not (isinstance(rank, int) and rank >= 0):
            raise ValueError(f"residual_rank is {rank!r}, not a number of 0 or more")
        lent = raw.get("united", {})
        united, ways = (tuple(lent.get(key, ())) for key in ("of", "ways"))
        if not all(isinstance(at, int) for at in (*united, *ways)):
            raise ValueError(f"united is {lent}, and has other than integers")
    except OSError as error:
        raise SharingError(f"{path} is not readable: {error}") from None
    except SharingError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SharingError(
            f"{path} is no map of shared experts: {error!r}; `jmoe consolidate` writes one"
        ) from None
    if owners.shape[1:] != shape:
        raise SharingError(
            f"{path} is of models with {list(owners.shape[1:])} (MoE layers, experts); those named "
            f"have {list(shape)}"
        )
    order = [
        _known(path, name, directory, prints, names) for name, directory in directories.items()
    ]
    left = sorted(set(range(len(names))) - set(order))
    if left or len(order) != len(names):
        missing = ", ".join(names[at] for at in left) or "another model twice"
        raise SharingError(
            f"{path} is of {len(names)} models; {missing} was made with them and is not named. "
            "Serve all of them, or run `jmoe consolidate` for these"
        )
    sharing = Sharing(
        tuple(names), owners.astype(np.int32), tuple(prints), facts, path.parent, rank, united, ways
    )
    return _reordered(sharing, order, tuple(directories))


def _known(path: Path, name: str, directory: Path, prints: list[str], names: list[str]) -> int:
    """Returns which of the file's models a directory is."""
    found = weights_digest(directory)
    if found in prints:
        return prints.index(found)
    known = f"; its {name} had other weights" if name in names else ""
    raise SharingError(
        f"{path} was not made with {directory}, which is served as {name}{known}. It knows "
        f"{', '.join(names)}; run `jmoe consolidate` again for the directories that you serve"
    )


def _reordered(sharing: Sharing, order: Sequence[int], names: tuple[str, ...]) -> Sharing:
    number = np.empty(len(order) + 1, np.int32)
    number[order] = np.arange(len(order))
    number[MERGED] = MERGED  # the last entry
    owners = number[sharing.owners[list(order)]]
    prints = tuple(sharing.fingerprints[at] for at in order)
    united = tuple(number[list(sharing.united)][list(order)].tolist()) if sharing.united else ()
    return replace(sharing, names=names, owners=owners, fingerprints=prints, united=united)
