"""Whether a Deephaven server gives back the rows of an Arrow file, vectors bit for bit, that its
Flight port has taken."""

import struct
import sys

import numpy
import pyarrow
from deephaven_server import Server
from pyarrow import flight

# A ticket of Deephaven: a table that a client exports under a number of its choice.
NUMBER = 7


class Session(flight.ClientMiddlewareFactory):
    """Anybody may come in; the token of the first answer names the session from then on."""

    def __init__(self):
        super().__init__()
        self.token = "Anonymous"

    def start_call(self, info):
        return Call(self)


class Call(flight.ClientMiddleware):
    def __init__(self, session):
        super().__init__()
        self.session = session

    def sending_headers(self):
        return {"authorization": self.session.token}

    def received_headers(self, headers):
        for name, values in headers.items():
            if name.lower() == "authorization":
                self.session.token = values[0]


def bits(table):
    return table["vector"].combine_chunks().flatten().to_numpy().view(numpy.uint32)


anybody = "-DAuthHandlers=io.deephaven.auth.AnonymousAuthenticationHandler"
server = Server(port=0, jvm_args=["-Xmx1g", anybody])
server.start()

rows = pyarrow.ipc.open_stream(sys.argv[1]).read_all()
client = flight.FlightClient(f"grpc://127.0.0.1:{server.port}", middleware=[Session()])
descriptor = flight.FlightDescriptor.for_path("export", str(NUMBER))
writer, answers = client.do_put(descriptor, rows.schema)
for batch in rows.to_batches():
    writer.write_batch(batch)
writer.done_writing()
while answers.read() is not None:
    pass
writer.close()
found = client.do_get(flight.Ticket(b"e" + struct.pack("<i", NUMBER))).read_all()
for name in ["id", "text"]:
    assert found[name].to_pylist() == rows[name].to_pylist()
assert numpy.array_equal(bits(found), bits(rows))
print(len(bits(rows)), "values are equal")
