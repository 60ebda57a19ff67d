"""What bodkin's Flight server refuses: pyarrow's client asks for too much."""

import sys

import pyarrow
from pyarrow import flight

what, address = sys.argv[1:]
client = flight.FlightClient(address)
SCHEMA = pyarrow.schema([("text", pyarrow.string())])
MODEL = flight.FlightDescriptor.for_path("bert")


def options(key=None):
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    return flight.FlightCallOptions(headers=headers, timeout=60)


def batch(texts):
    return pyarrow.record_batch([pyarrow.array(texts, pyarrow.string())], schema=SCHEMA)


def exchange(texts, key=None):
    writer, reader = client.do_exchange(MODEL, options(key))
    writer.begin(SCHEMA)
    writer.write_batch(batch(texts))
    writer.done_writing()
    return reader.read_all()


def put(name, texts):
    writer, answers = client.do_put(flight.FlightDescriptor.for_path("bert", name), SCHEMA)
    writer.write_batch(batch(texts))
    writer.done_writing()
    while answers.read() is not None:
        pass
    writer.close()


def refused(expected, ask):
    try:
        ask()
    except (pyarrow.ArrowException, flight.FlightError) as error:
        assert expected in str(error), error
        return
    raise AssertionError(f"expected an error: {expected}")


def keys():
    for _ in range(3):
        exchange(["a hen"], "few")
    refused("requests of this minute", lambda: exchange(["a hen"], "few"))
    exchange(["a hen with more than twenty tokens, as its many letters are tokens"], "short")
    refused("tokens of this minute", lambda: exchange(["a hen"], "short"))


def in_bytes():
    # A vector has 256 bytes: three results of 3000 are more than two megabytes.
    for name in ["first", "second", "third"]:
        put(name, ["a hen"] * 3000)
    refused("there is no result `first`", lambda: client.get_flight_info(
        flight.FlightDescriptor.for_path("bert", "first")))
    assert client.do_get(flight.Ticket(b"third")).read_all().num_rows == 3000
    refused("results exceed 2000000 bytes", lambda: put("large", ["a hen"] * 9000))
    refused("", lambda: exchange(["x" * 2_000_000]))
    # The server goes on.
    assert exchange(["a hen"]).num_rows == 1


def queue():
    streams = [client.do_exchange(MODEL, options()) for _ in range(8)]
    for writer, _ in streams:
        writer.begin(SCHEMA)
        writer.write_batch(batch(["some hens and their many seeds"] * 1000))
        writer.done_writing()
    refusals = 0
    for _, reader in streams:
        try:
            assert reader.read_all().num_rows == 1000
        except flight.FlightError as error:
            assert "queue" in str(error), error
            refusals += 1
    assert 0 < refusals < len(streams), refusals


def drain():
    writer, reader = client.do_exchange(MODEL, options())
    writer.begin(SCHEMA)
    writer.write_batch(batch(["a hen"]))
    assert reader.read_chunk().data.num_rows == 1
    print("streaming", flush=True)
    refused("", reader.read_chunk)
    print("ended", flush=True)


{"keys": keys, "bytes": in_bytes, "queue": queue, "drain": drain}[what]()
