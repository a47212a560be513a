"""Device calls as messages: process 0 sends each call before it makes it, and followers repeat
it.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from jmoe.steps import StepOutput
from serving.execution.buckets import Key
from serving.execution.device import Device
from serving.execution.programs import Progress

if TYPE_CHECKING:
    from serving.cluster.followers import Followers


class Numbers(NamedTuple):
    """Int32 arrays of any ranks, as one: a message with few arrays takes less time."""

    ranks: list[int]
    sizes: list[int]  # the shapes, one after another
    data: Int32[np.ndarray, "n"]  # row by row, likewise


class Compile(NamedTuple):
    """See Device, as of the others."""

    keys: list[Key]


class Warm(NamedTuple):
    """See Device."""

    key: Key


class Run(NamedTuple):
    """See Device; `arrays` are the arguments behind weights and state."""

    key: Key
    arrays: Numbers
    score: bool
    sample: bool
    models: list[int]


class Seat(NamedTuple):
    """See Device."""

    rank: int
    told: Numbers


class Draw(NamedTuple):
    """See Device."""

    arrays: Numbers


class UseWay(NamedTuple):
    """See Device."""

    way: int


class LoadWay(NamedTuple):
    """See Device."""

    way: int
    layer: int


class HostLayer(NamedTuple):
    """See Device."""

    layer: int
    hosts: Bool[np.ndarray, "E D"]


class Ready(NamedTuple):
    """See Device."""


CALLS = (Compile, Warm, Run, Seat, Draw, UseWay, LoadWay, HostLayer, Ready)
"""The messages, a type for each call."""


class Led:
    """The device of process 0: every call is told to the other processes first."""

    def __init__(self, device: Device, followers: "Followers") -> None:
        self._device, self._followers = device, followers

    def compile(self, keys: Sequence[Key], progress: Progress | None = None) -> None:
        """See Device."""
        self._followers.call(Compile([*keys]))
        self._device.compile(keys, progress)

    def warm(self, key: Key) -> None:
        """See Device."""
        self._followers.call(Warm(key))
        self._device.warm(key)

    def run(
        self,
        key: Key,
        arrays: Sequence[np.ndarray],
        *,
        models: Sequence[int] = (0,),
        score: bool = False,
        sample: bool = False,
    ) -> StepOutput:
        """See Device."""
        message = Run(key, to_message(*arrays), score, sample, [*models])
        self._followers.call(message)
        return self._device.run(key, arrays, models=models, score=score, sample=sample)

    def seat(self, rank: int, told: Int[np.ndarray, "1 n"]) -> None:
        """See Device."""
        self._followers.call(Seat(rank, to_message(told)))
        self._device.seat(rank, told)

    def draw(
        self,
        shapes: Int[np.ndarray, "B shape"],
        limited: Int[np.ndarray, "n"],
        allowed: Int[np.ndarray, "n W"],
    ) -> StepOutput:
        """See Device."""
        self._followers.call(Draw(to_message(shapes, limited, allowed)))
        return self._device.draw(shapes, limited, allowed)

    def use_way(self, way: int) -> None:
        """See Device."""
        self._followers.call(UseWay(way))
        self._device.use_way(way)

    def load_way(self, way: int, layer: int) -> None:
        """See Device."""
        self._followers.call(LoadWay(way, layer))
        self._device.load_way(way, layer)

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """See Device."""
        self._followers.call(HostLayer(layer, hosts))
        self._device.host_layer(layer, hosts)

    def ready(self) -> None:
        """See Device."""
        self._followers.call(Ready())
        self._device.ready()


def replay(device: Device, calls: Iterable[Any], progress: Progress | None = None) -> None:
    """Makes calls as they come, until there are no more. Raises what they raise."""
    for call in calls:
        match call:
            case Compile(keys):
                device.compile(keys, progress)
            case Warm(key):
                device.warm(key)
            case Run(key, arrays, score, sample, models):
                device.run(key, to_arrays(arrays), models=models, score=score, sample=sample)
            case Seat(rank, told):
                device.seat(rank, *to_arrays(told))
            case Draw(arrays):
                device.draw(*to_arrays(arrays))
            case UseWay(way):
                device.use_way(way)
            case LoadWay(way, layer):
                device.load_way(way, layer)
            case HostLayer(layer, hosts):
                device.host_layer(layer, hosts)
            case Ready():
                device.ready()
            case other:
                raise ValueError(f"process 0 asks for a call that is not known here: {other}")


def to_message(*arrays: np.ndarray) -> Numbers:
    """Returns int32 arrays as a message. Raises TypeError for another dtype."""
    for array in arrays:
        if array.dtype != np.int32:
            raise TypeError(f"an array of {array.dtype} cannot be sent; arguments are int32")
    sizes = [size for array in arrays for size in array.shape]
    data = np.concatenate([array.reshape(-1) for array in arrays])
    return Numbers([array.ndim for array in arrays], sizes, data)


def to_arrays(message: Numbers) -> list[np.ndarray]:
    """Returns the arrays that `to_message` was given. Raises ValueError where data and shapes
    disagree.
    """
    found, data, sizes = list[np.ndarray](), message.data, iter(message.sizes)
    for rank in message.ranks:
        shape = tuple(islice(sizes, rank))
        count = math.prod(shape)
        found.append(data[:count].reshape(shape))
        data = data[count:]
    if data.size:
        raise ValueError(f"{data.size} numbers are in none of the arrays, {message.sizes}")
    return found
