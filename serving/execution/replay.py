"""Device calls as messages: process 0 sends each call before it makes it, and followers repeat
it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Int

from jmoe.steps import StepOutput
from serving.execution.buckets import Key
from serving.execution.device import Calls, Device
from serving.execution.programs import Progress
from serving.proto.jmoe.v1 import hosts_pb2 as pb

if TYPE_CHECKING:
    from serving.cluster.followers import Followers

_WIRE = np.dtype("<i4")
"""How an element travels."""


class Led:
    """The device of process 0: every call is told to the other processes first."""

    def __init__(self, device: Device, followers: "Followers") -> None:
        self._device, self._followers = device, followers

    def compile(self, keys: Sequence[Key], progress: Progress | None = None) -> None:
        """See Calls."""
        self._followers.call(pb.Call(compile=pb.Programs(programs=map(to_program, keys))))
        self._device.compile(keys, progress)

    def warm(self, key: Key) -> None:
        """See Calls."""
        self._followers.call(pb.Call(warm=to_program(key)))
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
        """See Calls. A mesh of several processes has one model."""
        sent = [to_message(array) for array in arrays]
        run = pb.Run(program=to_program(key), arrays=sent, score=score, sample=sample)
        self._followers.call(pb.Call(run=run))
        return self._device.run(key, arrays, models=models, score=score, sample=sample)

    def seat(self, rank: int, told: Int[np.ndarray, "1 n"]) -> None:
        """See Calls."""
        self._followers.call(pb.Call(seat=pb.Seat(rank=rank, told=to_message(told))))
        self._device.seat(rank, told)

    def draw(
        self,
        shapes: Int[np.ndarray, "B shape"],
        limited: Int[np.ndarray, "n"],
        allowed: Int[np.ndarray, "n W"],
    ) -> StepOutput:
        """See Calls."""
        draw = pb.Draw(
            shapes=to_message(shapes), limited=to_message(limited), allowed=to_message(allowed)
        )
        self._followers.call(pb.Call(draw=draw))
        return self._device.draw(shapes, limited, allowed)

    def use_way(self, way: int) -> None:
        """See Calls."""
        self._followers.call(pb.Call(use_way=way))
        self._device.use_way(way)

    def load_way(self, way: int, layer: int) -> None:
        """See Calls."""
        self._followers.call(pb.Call(load_way=pb.WayLayer(way=way, layer=layer)))
        self._device.load_way(way, layer)

    def host_layer(self, layer: int, hosts: Bool[np.ndarray, "E D"]) -> None:
        """See Calls."""
        sent = pb.LayerHosts(layer=layer, hosts=to_message(hosts.astype(np.int32)))
        self._followers.call(pb.Call(host_layer=sent))
        self._device.host_layer(layer, hosts)

    def ready(self) -> None:
        """See Calls."""
        self._followers.call(pb.Call(ready=pb.Ready()))
        self._device.ready()


def replay(device: Calls, calls: Iterable[pb.Call], progress: Progress | None = None) -> None:
    """Makes calls as they come, until there are no more. Raises what they raise."""
    for call in calls:
        match call.WhichOneof("kind"):
            case "compile":
                device.compile([to_key(program) for program in call.compile.programs], progress)
            case "warm":
                device.warm(to_key(call.warm))
            case "run":
                run = call.run
                arrays = [to_array(array) for array in run.arrays]
                device.run(to_key(run.program), arrays, score=run.score, sample=run.sample)
            case "seat":
                device.seat(call.seat.rank, to_array(call.seat.told))
            case "draw":
                drawn = call.draw
                device.draw(*map(to_array, (drawn.shapes, drawn.limited, drawn.allowed)))
            case "use_way":
                device.use_way(call.use_way)
            case "load_way":
                device.load_way(call.load_way.way, call.load_way.layer)
            case "host_layer":
                hosts = to_array(call.host_layer.hosts).astype(bool)
                device.host_layer(call.host_layer.layer, hosts)
            case "ready":
                device.ready()
            case other:
                raise ValueError(f"process 0 asks for a call that is not known here: {other}")


def to_program(key: Key) -> pb.Program:
    """Returns a key as a message."""
    layers = None if key.layers is None else pb.Layers(first=key.layers[0], stop=key.layers[1])
    return pb.Program(
        phase=key.phase, size=key.size, bucket_percent=key.bucket_percent, layers=layers
    )


def to_key(program: pb.Program) -> Key:
    """Returns the key that `to_program` was given."""
    layers = program.layers
    part = (layers.first, layers.stop) if program.HasField("layers") else None
    return Key(program.phase, program.size, program.bucket_percent, part)


def to_message(array: np.ndarray) -> pb.Int32Array:
    """Returns an int32 array as a message. Raises TypeError for another dtype."""
    if array.dtype != np.int32:
        raise TypeError(f"an array of {array.dtype} cannot be sent; arguments are int32")
    return pb.Int32Array(shape=array.shape, data=array.astype(_WIRE, copy=False).tobytes())


def to_array(message: pb.Int32Array) -> np.ndarray:
    """Returns the array that `to_message` was given. Raises ValueError where bytes and shape
    disagree.
    """
    return np.frombuffer(message.data, _WIRE).astype(np.int32, copy=False).reshape(message.shape)
