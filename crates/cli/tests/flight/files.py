"""Whether Arrow and Parquet files have the vectors that the JSON has, and the caller's columns."""

import json
import os
import sys

import pyarrow
from pyarrow import parquet

folder = sys.argv[1]


def path(name):
    return os.path.join(folder, name)


rows = [json.loads(line) for line in open(path("o.jsonl"))]
assert [row["text"] for row in rows] == ["one hen", "two hens"]
tables = [pyarrow.ipc.open_stream(path("o.arrows")).read_all(),
          pyarrow.ipc.open_stream(path("piped.arrows")).read_all(),
          parquet.read_table(path("o.parquet"))]
for table in tables:
    assert table.schema.names == ["id", "vector", "text", "page", "tags", "ok"], table.schema
    vector = pyarrow.list_(pyarrow.float32(), len(rows[0]["embedding"]))
    assert table.schema.field("vector").type == vector, table.schema
    assert table["id"].to_pylist() == ["a", "b"]
    assert table["page"].to_pylist() == [1, None]
    assert table["tags"].to_pylist() == [["x"], []]
    assert table["ok"].to_pylist() == [True, False]
    for row, found in zip(rows, table["vector"].to_pylist()):
        wanted = pyarrow.array(row["embedding"], pyarrow.float32())
        assert pyarrow.array(found, pyarrow.float32()).equals(wanted)
again = [json.loads(line) for line in open(path("again.jsonl"))]
assert [row["embedding"] for row in again] == [row["embedding"] for row in rows]
assert [row["page"] if "page" in row else None for row in again] == [1, None]
