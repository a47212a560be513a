"""Non-expert weights of a family's models, of which some are on the device (Multi-MoE, 3.2).

A model's set is all its weights but the routed experts. Where not all sets fit, they lie in host
memory, in the layout that step programs take, and are copied to the device one tensor after
another, each in the place of one of the set that leaves: no layer is on the device twice. A tensor
whose content a resident set has as well is not copied.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from jmoe.host_memory import on_the_host
from jmoe.steps import served
from jmoe.weights import Params
from pallas_kernels.backend import backend

PIECE_BYTES = 8 << 20
"""Copied at once on a CPU, where a copy takes the memory's time from the steps beside it."""
ALIGNMENT = 64
"""Of bytes that an array on a CPU may be made of without a copy of its own."""


class ParamSets:
    """The sets, by the models' numbers; `sets[model]` is what a program gets.

    With `num_resident` 0, or room for all, every set is on the device for good.
    """

    def __init__(self, params: Sequence[Params], *, eager: bool = False, num_resident: int) -> None:
        """`params` are as models have them: on the device, or NumPy arrays. `eager` as in
        `jmoe.steps.served`. The first `num_resident` sets are on the device then.
        """
        self.bytes_copied = 0
        self._eager = eager
        self._thread: ThreadPoolExecutor | None = None
        num_resident = num_resident or len(params)
        if num_resident >= len(params):
            once = {id(one): served(one, eager=eager) for one in params}
            self.options = once[id(params[0])][1]
            self._on_device: list[Params | None] = [once[id(one)][0] for one in params]
            return
        leaves = []
        for one in params:
            with on_the_host():
                found, self.options = served(one, eager=eager)
            own, self._tree = jax.tree.flatten(jax.tree.map(np.asarray, found))
            leaves.append(own)
        self._host: list[list[np.ndarray]] = leaves
        self._content = [_contents(same) for same in zip(*leaves, strict=True)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jmoe-sets")
        self._held: dict[tuple[int, int], jax.Array] = {}  # by tensor and content
        self._on_device = [None] * len(params)
        for model in range(num_resident):
            self._fill(model, [])

    def __getitem__(self, model: int) -> Params:
        """Returns a model's set on the device. Raises KeyError for one that is not there."""
        found = self._on_device[model]
        if found is None:
            raise KeyError(f"the weights of model {model} are not on the device")
        return found

    @property
    def all_resident(self) -> bool:
        """Whether every set is on the device for good."""
        return self._thread is None

    @property
    def resident(self) -> list[int]:
        """Models whose sets are on the device."""
        return [model for model, found in enumerate(self._on_device) if found is not None]

    def placed(self, params: Params) -> Params:
        """Returns a set of host memory, as `served`, on the device; a tensor that another set has
        as well is that one.
        """
        with on_the_host():
            found, _ = served(params, eager=self._eager)
        others = {id(other): other for other in self._on_device if other is not None}

        def one(leaf: jax.Array | np.ndarray, *same: jax.Array) -> jax.Array:
            host = np.asarray(leaf)
            alike = (other for other in same if np.array_equal(np.asarray(other), host))
            found = next(alike, None)
            return _on_device(host) if found is None else found

        return jax.tree.map(one, found, *others.values())

    def put(self, model: int, params: Params) -> None:
        """Makes a set of the device a model's, where all sets are there; what it was is let go."""
        self._on_device[model] = params

    def replace(self, victim: int, model: int) -> "Future[None]":
        """Copies a model's set into the place of another's, which no step may use any more.

        The future is done when the set can be used; copying is done in a thread.
        """
        assert self._thread is not None
        self._on_device[victim] = None
        return self._thread.submit(self._replace, victim, model)

    def close(self) -> None:
        """Ends the thread, after what it copies."""
        if self._thread is not None:
            self._thread.shutdown()

    def _replace(self, victim: int, model: int) -> None:
        staying = [self._keys(other) for other in self.resident]
        kept = {key for keys in (*staying, self._keys(model)) for key in keys}
        self._fill(model, [key for key in self._keys(victim) if key not in kept])

    def _fill(self, model: int, leaving: Sequence[tuple[int, int]]) -> None:
        """Puts a set onto the device, and drops `leaving`, tensor by tensor."""
        gone, found = dict(leaving), []
        for number, key in enumerate(self._keys(model)):
            if number in gone:
                del self._held[number, gone[number]]
            if key not in self._held:
                host = self._host[model][number]
                self._held[key] = _on_device(host)
                self.bytes_copied += host.nbytes
            found.append(self._held[key])
        self._on_device[model] = jax.tree.unflatten(self._tree, found)

    def _keys(self, model: int) -> list[tuple[int, int]]:
        return [(number, content[model]) for number, content in enumerate(self._content)]


def _contents(leaves: Sequence[np.ndarray]) -> list[int]:
    """Returns, for each model's tensor, the first model whose tensor is equal."""
    return [
        next(at for at, other in enumerate(leaves) if other is leaf or np.array_equal(other, leaf))
        for leaf in leaves
    ]


def _on_device(host: np.ndarray) -> jax.Array:
    """Puts a tensor on the device before it returns; on a CPU in memory of its own."""
    if backend() == "cpu":
        host = _copied(host)
    placed = jax.device_put(host)
    placed.block_until_ready()
    return placed


def _copied(host: np.ndarray) -> np.ndarray:
    """Returns a copy that an array can be made of as it is; other threads run meanwhile."""
    raw = np.empty(host.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    copy, flat = raw[start : start + host.nbytes], np.ascontiguousarray(host).reshape(-1)
    given = flat.view(np.uint8)
    for at in range(0, host.nbytes, PIECE_BYTES):
        copy[at : at + PIECE_BYTES] = given[at : at + PIECE_BYTES]
    return copy.view(host.dtype).reshape(host.shape)
