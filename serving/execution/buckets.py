"""Which programs there are, by key, and which of them serves a step.

A threshold bucket b is a capacity that serves every threshold up to b: it sizes the dispatch for as
many experts as a step at t <= b can touch. The threshold itself is traced and never rounded.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from pallas_kernels.backend import backend
from serving.config import EngineConfig
from serving.plan import Limits

FULL_CAPACITY = 100
GPU_ROWS = 8
"""Rows of a decode step are a multiple of it on a GPU: cuBLAS takes no other number, and XLA would
pad and cut around every product, some six launches a layer.
"""


class Key(NamedTuple):
    """Which program. `size` is tokens of a `prefill` step and of `score`, else rows.

    A program for a part of a step runs from `first_layer` to `stop_layer`, which is 0 of others.
    A mixed decode step has `size` rows of each of several `models`.
    `score`, `sample` and `draw` run behind a step whose rows ask for it; `truncate` is `sample`
    with top-k and top-p (`sampling_phases`). `seat` has the positions of a sequence.
    Of a size whose prefill steps copy experts while they run, `copies` False is the one that does
    not. Of a hybrid step's tokens, the first up to `num_decodes` are of rows that decode.
    """

    phase: str
    size: int
    bucket_percent: int
    first_layer: int = 0
    stop_layer: int = 0
    models: int = 1
    copies: bool = True
    num_decodes: int = 0

    @property
    def name(self) -> str:
        """Name of its entry on disk."""
        part = f"-layers-{self.first_layer}-{self.stop_layer}" if self.stop_layer else ""
        part += "" if self.models == 1 else f"-models-{self.models}"
        part += "" if self.copies else "-no-copies"
        part += f"-decodes-{self.num_decodes}" if self.num_decodes else ""
        return f"{self.phase}-{self.size}-{self.bucket_percent}{part}"


def sampling_phases() -> tuple[str, ...]:
    """Returns a phase for each sampling mode on a GPU; on a CPU, where compiling is slow, one for
    all.
    """
    return ("draw",) if backend() == "cpu" else ("sample", "truncate", "draw")


def sizes_up_to(largest: int, smallest: int, factor: Callable[[int], int]) -> tuple[int, ...]:
    """Returns `smallest`, `factor(size)` times a size for as long as that is below `largest`, and
    `largest`.
    """
    sizes = []
    while smallest < largest:
        sizes.append(smallest)
        smallest *= factor(smallest)
    return (*sizes, largest)


def with_default_buckets(config: EngineConfig, num_ranks: int = 1) -> EngineConfig:
    """Returns `config` with the buckets that it leaves open, and without those that no step
    reaches.

    Over a mesh a size is each rank's.

    On a GPU powers of two and four capacities; a decode step's rows are multiples of `GPU_ROWS`. On
    a CPU, where a program takes four seconds of a core to compile, few: sizes are four times apart,
    and a step at full capacity takes no longer than one at less, as its loop runs over the experts
    that are visited. Sizes between them come late, but for a mesh or asynchronous workers, which
    have 8 rows at the start.
    """
    on_cpu = backend() == "cpu"
    most = -(-config.max_num_seqs // num_ranks)
    least, whole = (4, most) if on_cpu else (GPU_ROWS, -(-most // GPU_ROWS) * GPU_ROWS)
    has_late = on_cpu and num_ranks == 1 and config.mode != "aep"
    fine = 16 if on_cpu and not has_late else 0
    decode = sizes_up_to(whole, least, lambda n: 4 if on_cpu and n >= fine else 2)
    prefill = sizes_up_to(config.max_prefill_tokens, 32, lambda n: 4 if on_cpu else 2)
    late_decode, late_prefill = (), ()
    if has_late and not config.decode_buckets:
        late_decode = _between(decode, 1)
    if has_late and not config.prefill_buckets:
        late_prefill = _between(prefill, 32)
    thresholds = (FULL_CAPACITY,) if on_cpu else (20, 40, 70, FULL_CAPACITY)
    return replace(
        config,
        decode_buckets=_up_to(config.decode_buckets or decode, most),
        late_decode_buckets=config.late_decode_buckets or late_decode,
        prefill_buckets=_up_to(config.prefill_buckets or prefill, config.max_prefill_tokens),
        late_prefill_buckets=config.late_prefill_buckets or late_prefill,
        threshold_buckets_percent=config.threshold_buckets_percent or thresholds,
    )


def _between(sizes: tuple[int, ...], smallest: int) -> tuple[int, ...]:
    """Returns powers of two from `smallest` on, and three quarters of the largest size, that are
    not among `sizes`.
    """
    found = {*sizes_up_to(sizes[-1], smallest, lambda n: 2), 3 * sizes[-1] // 4}
    return tuple(n for n in sorted(found - {*sizes}) if n >= smallest)


def _up_to(sizes: tuple[int, ...], most: int) -> tuple[int, ...]:
    return sizes[: bisect_left(sizes, most) + 1]


def cuts(at_once: int, num_layers: int) -> list[tuple[int, int]]:
    """Returns (first layer, layer to stop at) of parts of `at_once` layers; the last may have
    fewer.
    """
    return [(first, min(first + at_once, num_layers)) for first in range(0, num_layers, at_once)]


class Buckets:
    """Sizes that programs are compiled for, on each device of a mesh, and the choice among them."""

    def __init__(self, config: EngineConfig, limits: Limits, num_models: int = 1) -> None:
        """`num_models` is how many a decode step may have rows of; a rank has one slot or more for
        each.
        """
        config = with_default_buckets(config, limits.num_ranks)
        self.mixed = range(2, min(num_models, limits.slots_per_rank) + 1)
        self.decode, self.prefill = config.decode_buckets, config.prefill_buckets
        self._there = {"decode": self.decode, "prefill": self.prefill}  # with late ones that are
        late = {"decode": config.late_decode_buckets, "prefill": config.late_prefill_buckets}
        self.late = [
            (phase, size)
            for phase, sizes in late.items()
            for size in reversed(sizes)
            if size < self._there[phase][-1] and size not in self._there[phase]
        ]
        """Phases and sizes of steps whose programs come once the server is ready, in this order."""
        self.switched: frozenset[int] = frozenset()
        """Prefill sizes that have programs which copy experts and programs which do not."""
        wanted = config.hybrid_steps == "on" or (
            config.hybrid_steps == "auto" and backend() != "cpu"
        )
        apart = config.mode == "aep" or bool(config.mesh) or config.resident_experts > 0
        self.has_hybrid = wanted and not apart and limits.num_ranks == 1
        self.thresholds = config.threshold_buckets_percent
        self.chunks = limits.max_prefill_seqs
        self._config, self._limits = config, limits

    @property
    def seat(self) -> Key:
        """The program that seats a sequence in a slot (`jmoe.shaping.seat`)."""
        return Key("seat", self._config.max_model_len, FULL_CAPACITY)

    def keys(self) -> list[Key]:
        """Returns every program that serving may need, the ones most needed first."""
        thresholds = sorted(self.thresholds, reverse=True)
        keys = [Key("decode", n, t) for t in thresholds for n in reversed(self.decode)]
        prefill = [Key("prefill", n, t) for t in thresholds for n in reversed(self.prefill)]
        keys += self._forms(prefill)
        hybrid = [self._hybrid(n) for n in reversed(self.prefill) if self.has_hybrid]
        keys += hybrid
        keys += self.mixed_keys()
        keys.append(Key("score", self.prefill[-1], FULL_CAPACITY))
        mixed = {count * size for count in self.mixed for size in self.decode}
        rows = sorted({*self.decode, self.chunks, *mixed, *map(self.rows, hybrid)})
        keys += [Key(phase, n, FULL_CAPACITY) for phase in sampling_phases() for n in rows]
        return [*keys, self.seat]

    def _forms(self, keys: list[Key]) -> list[Key]:
        """Returns programs of steps, and those of switched sizes that copy no experts."""
        switched = [key for key in keys if key.phase == "prefill" and key.size in self.switched]
        return keys + [key._replace(copies=False) for key in switched]

    def late_keys(self, phase: str, size: int) -> list[Key]:
        """Returns the programs that a phase's late size takes; a prefill step's tokens are drawn by
        those of the start.
        """
        draws = sampling_phases() if phase == "decode" else ()
        keys = [Key(draw, size, FULL_CAPACITY) for draw in draws]
        return keys + [Key(phase, size, percent) for percent in self.thresholds]

    def add_late(self, phase: str, size: int) -> None:
        """Has steps of one model choose a phase's late size, whose programs are there now."""
        self._there[phase] = tuple(sorted({*self._there[phase], size}))

    def mixed_keys(self) -> list[Key]:
        """Returns the keys of mixed decode steps."""
        thresholds = sorted(self.thresholds, reverse=True)
        return [
            Key("decode", size, percent, models=count)
            for count in self.mixed
            for percent in thresholds
            for size in reversed(self.decode)
        ]

    def step_keys(self) -> list[Key]:
        """Returns the keys of steps of one model and one phase."""
        steps = (key for key in self.keys() if key.phase in ("prefill", "decode"))
        return [key for key in steps if key.models == 1 and not key.num_decodes]

    def _hybrid(self, size: int) -> Key:
        """Returns the program of a hybrid step of `size` tokens."""
        return Key("prefill", size, FULL_CAPACITY, num_decodes=min(size, self.decode[-1]))

    def part(
        self, key: Key, layers: tuple[int, int], at_once: Mapping[tuple[str, int], int]
    ) -> Key:
        """Returns the smallest program of at least the key's size for these layers, in one part.

        `at_once` has the layers of a part by phase and size. Of a size that is cut otherwise are
        steps that were begun with more rows: some have left since.
        """
        size = min(
            size
            for (phase, size), count in at_once.items()
            if phase == key.phase
            and size >= key.size
            and layers in cuts(count, self._limits.num_layers)
        )
        first, stop = layers
        return key._replace(
            size=size, bucket_percent=FULL_CAPACITY, first_layer=first, stop_layer=stop
        )

    def parts(self, at_once: Mapping[tuple[str, int], int]) -> list[Key]:
        """Returns programs for parts of steps, of `at_once` layers by phase and size, the largest
        first.

        They have capacity for every threshold: less would multiply them.
        """
        num_layers = self._limits.num_layers
        return self._forms(
            [
                Key(phase, size, FULL_CAPACITY, *layers)
                for (phase, size), count in sorted(at_once.items(), reverse=True)
                if count < num_layers
                for layers in cuts(count, num_layers)
            ]
        )

    def choose(
        self,
        phase: str,
        size: int,
        threshold_percent: int,
        *,
        prompt_logprobs: bool,
        models: int = 1,
        hybrid: bool = False,
    ) -> Key:
        """Returns the smallest program that serves a step whose experts a threshold bounds.

        With `prompt_logprobs` it is the largest prefill program, the one that `score` follows.
        """
        if hybrid:
            return self._hybrid(self.bucket(phase, size))
        if prompt_logprobs:
            fits = self.prefill[-1]
        elif models == 1:
            fits = self._there[phase][bisect_left(self._there[phase], size)]
        else:
            fits = self.bucket(phase, size)
        percent = self.thresholds[bisect_left(self.thresholds, threshold_percent)]
        return Key(phase, fits, percent, models=models)

    def bucket(self, phase: str, size: int) -> int:
        """Returns the smallest size of a phase's programs at the start that holds `size`."""
        sizes = self.decode if phase == "decode" else self.prefill
        return sizes[bisect_left(sizes, size)]

    def rows(self, key: Key) -> int:
        """Returns the packed rows of a program."""
        chunked = key.phase in ("prefill", "score")
        return self.chunks + key.num_decodes if chunked else key.size

    def deltas(self, key: Key) -> int:
        """Returns how many block-table deltas a step can have: a page a row, and those its tokens
        fill; of prompts that begin with others' pages, all of these, too; in each group of layers.
        """
        limits, num_groups = self._limits, len(self._limits.windows)
        if key.phase == "decode":
            return num_groups * key.size
        most = key.size // limits.page_size + self.chunks
        if self._config.reuses_prefixes:
            most = max(most, self.chunks * limits.pages_for(self._config.max_model_len))
        return num_groups * (most + key.num_decodes)
