"""What bodkin's Flight server refuses: pyarrow's client asks for too much."""

import sys
import time

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
    long = ["a hen with more than twenty tokens, as its many letters are tokens"]
    refused("the key has 20 of its 20 tokens", lambda: exchange(long, "short"))
    exchange(["a hen"], "short")
    refused("tokens of this minute", lambda: exchange(["a hen"] * 9, "short"))


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


def owners():
    """A result is only for the key that sent its texts."""
    result, ticket = flight.FlightDescriptor.for_path("bert", "hens"), flight.Ticket(b"hens")
    for key, texts in [("one", ["a hen"]), ("other", ["two hens"])]:
        writer, answers = client.do_put(result, SCHEMA, options(key))
        writer.write_batch(batch(texts))
        writer.done_writing()
        while answers.read() is not None:
            pass
        writer.close()
    for key, texts in [("one", ["a hen"]), ("other", ["two hens"])]:
        assert client.do_get(ticket, options(key)).read_all()["text"].to_pylist() == texts
        refused("there is no result", lambda: client.do_get(ticket, options(key)))


def names():
    """Names of results are bounded, and results without rows count."""
    refused("at most 1024 bytes", lambda: put("n" * 1025, ["a hen"]))
    for i in range(3000):
        writer, answers = client.do_put(flight.FlightDescriptor.for_path("bert", str(i)), SCHEMA)
        writer.done_writing()
        while answers.read() is not None:
            pass
        writer.close()
    refused("there is no result `0`", lambda: client.get_flight_info(
        flight.FlightDescriptor.for_path("bert", "0")))
    assert client.do_get(flight.Ticket(b"2999")).read_all().schema.names == ["text", "vector"]


def kinds():
    """What a stream may be: strings of any kind, no rows, no batches, not compressed."""
    def ask(column, codec=None, batches=1):
        given = pyarrow.record_batch([column], ["text"])
        writer, reader = client.do_exchange(MODEL, options())
        writer.begin(given.schema, options=pyarrow.ipc.IpcWriteOptions(compression=codec))
        for _ in range(batches):
            writer.write_batch(given)
        writer.done_writing()
        return reader.read_all()
    words = pyarrow.array(["a hen", "two hens", "a hen"])
    wanted = ask(words)["vector"].to_pylist()
    columns = [words.dictionary_encode(), words.cast(pyarrow.large_string())]
    if hasattr(pyarrow, "string_view"):
        columns.append(pyarrow.array(words.to_pylist(), pyarrow.string_view()))
    for column in columns:
        assert ask(column)["vector"].to_pylist() == wanted, column.type
    for none in [ask(words.slice(0, 0)), ask(words, batches=0)]:
        assert none.num_rows == 0 and none.schema.names == ["text", "vector"], none.schema
    for codec in ["lz4", "zstd"]:
        refused("not compressed", lambda: ask(pyarrow.array(["hen"] * 100), codec))
    refused("expected strings, found Int64", lambda: ask(pyarrow.array([1])))


def idle():
    """A stream whose next message does not come."""
    writer, reader = client.do_exchange(MODEL, options())
    writer.begin(SCHEMA)
    writer.write_batch(batch(["a hen"]))
    assert reader.read_chunk().data.num_rows == 1
    refused("no message has arrived for 1 s", reader.read_chunk)


def unread():
    """Messages of streams that nobody reads, of 400 kB where all may have 2 MB."""
    large = pyarrow.schema([("text", pyarrow.string()), ("more", pyarrow.string())])
    rows = pyarrow.record_batch([["a hen"] * 4000, ["m" * 100] * 4000], schema=large)
    streams = []
    for _ in range(12):
        writer, reader = client.do_exchange(MODEL, options())
        streams.append((writer, reader))
        try:
            writer.begin(large)
            for _ in range(4):
                writer.write_batch(rows)
        except (pyarrow.ArrowException, flight.FlightError):
            pass
    refusals = 0
    for writer, reader in streams:
        try:
            writer.done_writing()
            reader.read_all()
        except (pyarrow.ArrowException, flight.FlightError) as error:
            assert "too large together" in str(error), error
            refusals += 1
    assert 0 < refusals < len(streams), refusals
    # All bytes are free again.
    exchange(["a hen"] * 4000)


def stalled():
    """A client that takes nothing of 8 MB, more than buffers on the way take."""
    large = pyarrow.schema([("text", pyarrow.string()), ("more", pyarrow.string())])
    rows = pyarrow.record_batch([["a hen"] * 8000, ["m" * 1000] * 8000], schema=large)
    writer, reader = client.do_exchange(MODEL, options())
    writer.begin(large)
    writer.write_batch(rows)
    time.sleep(4)
    refused("takes nothing", reader.read_all)


{"keys": keys, "bytes": in_bytes, "queue": queue, "drain": drain, "owners": owners,
 "names": names, "kinds": kinds, "idle": idle, "unread": unread,
 "stalled": stalled}[what]()
