"""Whether a dataset of a store has exactly the rows of an Arrow stream: ids, texts, and the bits of
the vectors; nothing lost and nothing twice."""

import json
import sys

import pyarrow
from pyarrow import flight

port, dataset, path = sys.argv[1:]
client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
found = client.do_get(flight.Ticket(json.dumps({"name": dataset}))).read_all()
wanted = pyarrow.ipc.open_stream(path).read_all()
assert found.num_rows == wanted.num_rows, (found.num_rows, wanted.num_rows)
names = [name for name in found.schema.names if name != "timestamp"]
assert sorted(names) == sorted(wanted.schema.names), found.schema
found = found.sort_by("id")
wanted = wanted.sort_by("id")
for name in names:
    if name != "vector":
        assert found[name].combine_chunks().equals(wanted[name].combine_chunks()), name


def bits(table):
    column = table["vector"].combine_chunks()
    return column.flatten().view(pyarrow.int32())


assert found.schema.field("vector").type == wanted.schema.field("vector").type
assert bits(found).equals(bits(wanted)), "the bits of the vectors"
print(found.num_rows)
