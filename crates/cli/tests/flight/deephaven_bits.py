"""Whether a Deephaven server gives back the rows of an Arrow file, vectors bit for bit."""

import sys

import numpy
import pyarrow
from deephaven_server import Server

Server(port=0, jvm_args=["-Xmx1g"]).start()

# The import needs the running server.
from deephaven import arrow  # noqa: E402


def bits(table):
    return table["vector"].combine_chunks().flatten().to_numpy().view(numpy.uint32)


rows = pyarrow.ipc.open_stream(sys.argv[1]).read_all()
found = arrow.to_arrow(arrow.to_table(rows))
for name in ["id", "text"]:
    assert found[name].to_pylist() == rows[name].to_pylist()
assert numpy.array_equal(bits(found), bits(rows))
print(len(bits(rows)), "values are equal")
