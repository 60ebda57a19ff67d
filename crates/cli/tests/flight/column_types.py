"""Writes Parquet files with many types, and compares what embed made of their columns."""

import datetime
import decimal
import json
import os
import sys

import pyarrow
from pyarrow import parquet

action, folder = sys.argv[1:]


def path(name):
    return os.path.join(folder, name)


def write(name, **columns):
    parquet.write_table(pyarrow.table(columns), path(name))


count = 1500
columns = {
    "text": [f"{i} hens" for i in range(count)],
    "late": pyarrow.array([None] * (count - 1) + [7], pyarrow.int32()),
    "large": pyarrow.array([2**64 - 1 - i for i in range(count)], pyarrow.uint64()),
    "float": [float("nan"), float("inf"), None] + [0.1] * (count - 3),
    "half": pyarrow.array([1.5] * count, pyarrow.float32()),
    "price": [decimal.Decimal("1.10")] * count,
    "day": [datetime.date(2020, 1, 2)] * count,
    "timestamp": pyarrow.array([1] * count, pyarrow.timestamp("us", tz="UTC")),
    "bytes": [b"\xff\x00"] * count,
    "word": pyarrow.array(["u", "v", None] * (count // 3)).dictionary_encode(),
    "nested": [{"a": [1, None], "b": "x"}] * count,
}
if action == "write":
    write("types.parquet", **columns)
    write("other.parquet", text=["a"], late=["b"])
    write("null-id.parquet", text=["a", "b"], id=[1, None])
    parquet.write_table(
        pyarrow.table({"text": ["a", "b"], "id": [None, "x"]}), path("null-id-unsaid.parquet"),
        write_statistics=False)
    write("long.parquet", text=["x" * 17_000_000])
    write("two-long.parquet", text=["y", "x" * 17_000_000])
    write("number.parquet", text=[1])
    for name in ["n", "text"]:
        names = ["text", "n", name]
        table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=names)
        parquet.write_table(table, path(f"two-{name}.parquet"))
else:
    wanted = pyarrow.table(columns)
    tables = [pyarrow.ipc.open_stream(path("types.arrows")).read_all(),
              parquet.read_table(path("made.parquet"))]
    for table in tables:
        for name in wanted.schema.names:
            kind = wanted.schema.field(name).type
            assert table.schema.field(name).type == kind, table.schema.field(name)
            # NaN is not equal to itself.
            assert repr(table[name].to_pylist()) == repr(wanted[name].to_pylist()), name
    line = json.loads(open(path("types.jsonl")).readline())
    assert line["timestamp"] == "1970-01-01T00:00:00.000001Z", line["timestamp"]
    assert (line["large"], line["price"], line["bytes"]) == (2**64 - 1, 1.1, "ff00")
    assert line.get("float") is None
    # A text of the command line comes first and has no columns.
    mixed = pyarrow.ipc.open_stream(path("mixed.arrows")).read_all()
    assert mixed["text"].to_pylist() == ["hello"] + wanted["text"].to_pylist()
    assert mixed["price"].to_pylist() == [None] + wanted["price"].to_pylist()
