from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromFollower(_message.Message):
    __slots__ = ("join", "failed")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    join: Join
    failed: str
    def __init__(self, join: _Optional[_Union[Join, _Mapping]] = ..., failed: _Optional[str] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("process_index", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROCESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    process_index: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, process_index: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ToFollower(_message.Message):
    __slots__ = ("begin", "call", "stop")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    begin: Begin
    call: Call
    stop: Stop
    def __init__(self, begin: _Optional[_Union[Begin, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("jax_coordinator",)
    JAX_COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    jax_coordinator: str
    def __init__(self, jax_coordinator: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Call(_message.Message):
    __slots__ = ("compile", "warm", "run", "use_way", "load_way", "ready", "host_layer", "seat", "draw")
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    USE_WAY_FIELD_NUMBER: _ClassVar[int]
    LOAD_WAY_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    HOST_LAYER_FIELD_NUMBER: _ClassVar[int]
    SEAT_FIELD_NUMBER: _ClassVar[int]
    DRAW_FIELD_NUMBER: _ClassVar[int]
    compile: Programs
    warm: Program
    run: Run
    use_way: int
    load_way: WayLayer
    ready: Ready
    host_layer: LayerHosts
    seat: Seat
    draw: Draw
    def __init__(self, compile: _Optional[_Union[Programs, _Mapping]] = ..., warm: _Optional[_Union[Program, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., use_way: _Optional[int] = ..., load_way: _Optional[_Union[WayLayer, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., host_layer: _Optional[_Union[LayerHosts, _Mapping]] = ..., seat: _Optional[_Union[Seat, _Mapping]] = ..., draw: _Optional[_Union[Draw, _Mapping]] = ...) -> None: ...

class Programs(_message.Message):
    __slots__ = ("programs",)
    PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    programs: _containers.RepeatedCompositeFieldContainer[Program]
    def __init__(self, programs: _Optional[_Iterable[_Union[Program, _Mapping]]] = ...) -> None: ...

class Program(_message.Message):
    __slots__ = ("phase", "size", "bucket_percent", "layers")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_PERCENT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    phase: str
    size: int
    bucket_percent: int
    layers: Layers
    def __init__(self, phase: _Optional[str] = ..., size: _Optional[int] = ..., bucket_percent: _Optional[int] = ..., layers: _Optional[_Union[Layers, _Mapping]] = ...) -> None: ...

class Layers(_message.Message):
    __slots__ = ("first", "stop")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    first: int
    stop: int
    def __init__(self, first: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("program", "arrays", "score", "sample")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    program: Program
    arrays: _containers.RepeatedCompositeFieldContainer[Int32Array]
    score: bool
    sample: bool
    def __init__(self, program: _Optional[_Union[Program, _Mapping]] = ..., arrays: _Optional[_Iterable[_Union[Int32Array, _Mapping]]] = ..., score: _Optional[bool] = ..., sample: _Optional[bool] = ...) -> None: ...

class Int32Array(_message.Message):
    __slots__ = ("shape", "data")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class WayLayer(_message.Message):
    __slots__ = ("way", "layer")
    WAY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    way: int
    layer: int
    def __init__(self, way: _Optional[int] = ..., layer: _Optional[int] = ...) -> None: ...

class LayerHosts(_message.Message):
    __slots__ = ("layer", "hosts")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    hosts: Int32Array
    def __init__(self, layer: _Optional[int] = ..., hosts: _Optional[_Union[Int32Array, _Mapping]] = ...) -> None: ...

class Seat(_message.Message):
    __slots__ = ("rank", "told")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    told: Int32Array
    def __init__(self, rank: _Optional[int] = ..., told: _Optional[_Union[Int32Array, _Mapping]] = ...) -> None: ...

class Draw(_message.Message):
    __slots__ = ("shapes", "limited", "allowed")
    SHAPES_FIELD_NUMBER: _ClassVar[int]
    LIMITED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_FIELD_NUMBER: _ClassVar[int]
    shapes: Int32Array
    limited: Int32Array
    allowed: Int32Array
    def __init__(self, shapes: _Optional[_Union[Int32Array, _Mapping]] = ..., limited: _Optional[_Union[Int32Array, _Mapping]] = ..., allowed: _Optional[_Union[Int32Array, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
