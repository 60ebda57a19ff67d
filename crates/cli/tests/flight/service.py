"""pyarrow's client against bodkin's Flight server."""

import json
import sys
import urllib.request

import pyarrow
from pyarrow import flight

if sys.argv[1] == "--tls":
    with open(sys.argv[3], "rb") as file:
        client = flight.FlightClient(
            f"grpc+tls://localhost:{sys.argv[2]}", tls_root_certs=file.read())
    assert [info.descriptor.path for info in client.list_flights()] == [[b"bert"]]
    sys.exit()

address, url, key = sys.argv[1:]
client = flight.FlightClient(address)
call = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {key}".encode())])
model = flight.FlightDescriptor.for_path("bert")
SCHEMA = pyarrow.schema([("number", pyarrow.int32()), ("text", pyarrow.string())])


def fails(expected, kind, ask):
    try:
        ask()
    except kind as error:
        assert expected in str(error), error
        return
    raise AssertionError(f"expected an error: {expected}")


def batch(texts):
    return pyarrow.record_batch([pyarrow.array(range(len(texts)), pyarrow.int32()),
                                 pyarrow.array(texts, pyarrow.string())], schema=SCHEMA)


def over_http(texts):
    body = json.dumps({"input": texts}).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    with urllib.request.urlopen(
            urllib.request.Request(url + "/v1/embeddings", body, headers)) as answer:
        return [item["embedding"] for item in json.load(answer)["data"]]


def same(table, texts):
    wanted = pyarrow.array(over_http(texts)).flatten().cast(pyarrow.float32())
    column = table["vector"].combine_chunks()
    assert column.flatten().equals(wanted)
    assert table["text"].to_pylist() == texts


for wrong in [flight.FlightCallOptions(),
              flight.FlightCallOptions(headers=[(b"authorization", b"Bearer no")])]:
    fails("API key", flight.FlightUnauthenticatedError,
          lambda: client.get_flight_info(model, wrong))
assert [info.descriptor.path for info in client.list_flights(options=call)] == [[b"bert"]]
info = client.get_flight_info(model, call)
size = json.loads(info.app_metadata)["dimension"] if hasattr(info, "app_metadata") else None
schema = client.get_schema(model, call).schema
assert schema == info.schema, (schema, info.schema)
assert size in (None, schema.field("vector").type.list_size)

# Vectors come back while the stream of texts is open.
writer, reader = client.do_exchange(model, call)
writer.begin(SCHEMA)
for texts in [["a hen"], ["two hens", "three hens"]]:
    writer.write_batch(batch(texts))
    same(pyarrow.Table.from_batches([reader.read_chunk().data]), texts)
writer.done_writing()
fails("", StopIteration, reader.read_chunk)
writer.close()

# A stored result is fetched once.
many = [f"{i} hens" for i in range(3000)]
stored = flight.FlightDescriptor.for_path("bert", "hens")
writer, answers = client.do_put(stored, SCHEMA, call)
writer.write_batch(batch(many))
writer.done_writing()
rows = []
while (answer := answers.read()) is not None:
    rows.append(json.loads(answer.to_pybytes()))
assert rows[-1] == {"rows": 3000, "result": "hens"}, rows
writer.close()
info = client.get_flight_info(stored, call)
assert info.total_records == 3000
ticket = info.endpoints[0].ticket
table = client.do_get(ticket, call).read_all()
assert table.num_rows == 3000 and table["number"].to_pylist() == list(range(3000))
same(table.slice(0, 100), many[:100])
fails("there is no result `hens`", pyarrow.ArrowKeyError, lambda: client.do_get(ticket, call).read_all())


def exchange(texts, schema=SCHEMA):
    writer, reader = client.do_exchange(model, call)
    writer.begin(schema)
    writer.write_batch(texts)
    writer.done_writing()
    reader.read_all()


fails("row 2 of the batch: the text is empty", pyarrow.ArrowInvalid,
      lambda: exchange(batch(["x", ""])))
fails("tokens", pyarrow.ArrowInvalid, lambda: exchange(batch(["long " * 300])))
numbers = pyarrow.record_batch([pyarrow.array([1])], names=["number"])
fails("expected a column `text`", pyarrow.ArrowInvalid, lambda: exchange(numbers, numbers.schema))
fails("there are no actions", NotImplementedError,
      lambda: list(client.do_action(flight.Action("x", b""), call)))
