"""A vector store with Longbow's two ports, for tests: what it accepts lands later, what it has
acknowledged is on disk, and it can be told to be slow, to refuse keys, to hang, to die, to change
a bit of a row, and to close its meta port for a while."""

import argparse
import json
import os
import threading
import time

import numpy
import pyarrow
import pyarrow.compute as compute
from pyarrow import flight

OPERATORS = {
    "=": compute.equal, "eq": compute.equal, "==": compute.equal,
    "!=": compute.not_equal, "neq": compute.not_equal,
    ">": compute.greater, "gt": compute.greater, "<": compute.less, "lt": compute.less,
    ">=": compute.greater_equal, "ge": compute.greater_equal,
    "<=": compute.less_equal, "le": compute.less_equal,
}
# Longbow knows no others.
SEARCH_KEYS = {"dataset", "vector", "vectors", "k", "filters", "local_only", "text_query", "alpha",
               "graph_alpha"}


class Dataset:
    def __init__(self, schema):
        self.schema = schema
        self.landed = []
        self.waiting = []
        self.rows = 0

    def table(self):
        return pyarrow.Table.from_batches(list(self.landed), self.schema)


class Store:
    def __init__(self, options):
        self.options = options
        self.lock = threading.Lock()
        self.datasets = {}
        self.puts = 0
        self.accepted = 0
        self.hangs = False
        self.last_put = None
        self.meta = None
        for name in sorted(os.listdir(options.folder)) if options.folder else []:
            with pyarrow.OSFile(os.path.join(options.folder, name)) as file:
                reader = pyarrow.ipc.open_stream(file)
                dataset = self.open(name.split(".")[1], reader.schema)
                for batch in reader:
                    dataset.landed.append(batch)
                    dataset.rows += batch.num_rows
        threading.Thread(target=self.land, daemon=True).start()

    def open(self, name, schema):
        dataset = self.datasets.setdefault(name, Dataset(schema))
        for field in schema:
            index = dataset.schema.get_field_index(field.name)
            if index >= 0 and dataset.schema.field(index).type != field.type:
                raise pyarrow.ArrowInvalid(
                    f'schema mismatch: type mismatch for column "{field.name}": '
                    f"existing={dataset.schema.field(index).type}, new={field.type}")
        return dataset

    def find(self, name):
        if name not in self.datasets:
            raise pyarrow.ArrowKeyError(f"dataset not found: {name}")
        return self.datasets[name]

    def persist(self, name, batches):
        """Each stream is a file of its own, complete before it has its name."""
        if not self.options.folder:
            return
        path = os.path.join(self.options.folder, f"{time.time_ns():020}.{name}")
        with pyarrow.OSFile(path + ".new", "wb") as file:
            with pyarrow.ipc.new_stream(file, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
        os.rename(path + ".new", path)

    def put(self, name, reader, writer):
        idle = time.monotonic() - self.last_put if self.last_put else 0
        with self.lock:
            dataset = self.open(name, reader.schema)
        self.puts += 1
        if self.options.slow_down and self.puts % self.options.slow_down == 0:
            writer.write(json.dumps(
                {"status": "slow_down", "reason": "wal_pressure"}).encode())
        if self.options.hang_after and self.accepted >= self.options.hang_after:
            self.hangs = True
            print("put", 0, 0, flush=True)
            threading.Event().wait()
        batches = [chunk.data for chunk in reader]
        rows = sum(batch.num_rows for batch in batches)
        self.accepted += rows
        if self.options.die_after and self.accepted > self.options.die_after:
            half = batches[0].slice(0, batches[0].num_rows // 2)
            self.persist(name, [half])
            os._exit(9)
        if batches:
            self.persist(name, batches)
        with self.lock:
            dataset.waiting.extend(batches)
        if self.options.meta_away_after and self.accepted >= self.options.meta_away_after:
            self.options.meta_away_after = 0
            self.close_meta()
        # The rows, and how long before them no stream came, in milliseconds.
        print("put", rows, int(1000 * idle), flush=True)
        self.last_put = time.monotonic()

    def open_meta(self, port):
        self.meta = Port(self, port, True)

    def close_meta(self):
        port = self.meta.port
        self.meta.shutdown()
        threading.Timer(1, self.open_meta, [port]).start()

    def land(self):
        while True:
            time.sleep(self.options.land_ms / 1000)
            with self.lock:
                for dataset in self.datasets.values():
                    if dataset.waiting:
                        batch = dataset.waiting.pop(0)
                        dataset.landed.append(batch)
                        dataset.rows += batch.num_rows

    def listed(self, name, dataset, item):
        """As Longbow: other operators on names match everything."""
        if item["field"] == "name":
            return item["operator"] != "contains" or item["value"] in name
        operators = {">": dataset.rows.__gt__, "<=": dataset.rows.__le__,
                     "==": dataset.rows.__eq__}
        return operators[item["operator"]](int(item["value"]))

    def readiness(self, name):
        while self.hangs:
            time.sleep(0.1)
        with self.lock:
            if name not in self.datasets:
                return {"status": "NOT_FOUND", "reason": "dataset not found"}
            dataset = self.datasets[name]
            # The index is behind, also when nothing waits.
            status = "BUSY" if dataset.waiting else "READY"
            return {"status": status, "index_len": dataset.rows // 2}

    def get(self, ticket):
        asked = json.loads(ticket) if ticket.startswith("{") else {"name": ticket}
        with self.lock:
            table = self.find(asked.get("name") or asked.get("dataset")).table()
        for item in asked.get("filters", []):
            column = table[item["field"]]
            value = item["value"]
            value = int(value) if pyarrow.types.is_integer(column.type) else str(value)
            operator = OPERATORS[item.get("operator") or item["op"]]
            table = table.filter(operator(column, pyarrow.scalar(value, column.type)))
        if self.options.flip_bit_of is not None:
            table = self.with_flipped_bit(table, self.options.flip_bit_of)
        return flight.RecordBatchStream(table)

    def with_flipped_bit(self, table, row):
        """The last bit of the last value of a row's vector is another one."""
        column = table["vector"].combine_chunks()
        values = column.flatten().to_numpy().copy()
        found = [i for i, other in enumerate(table["id"].to_pylist()) if other == row]
        values.view(numpy.uint32).reshape(-1, column.type.list_size)[found, -1] ^= 1
        vectors = pyarrow.FixedSizeListArray.from_arrays(values, type=column.type)
        index = table.schema.get_field_index("vector")
        return table.set_column(index, table.schema.field(index), vectors)

    def search(self, asked):
        unknown = set(asked) - SEARCH_KEYS
        if unknown:
            raise pyarrow.ArrowInvalid(f"unknown keys {unknown}")
        with self.lock:
            table = self.find(asked["dataset"]).table()
        if asked["k"] < 1:
            raise pyarrow.ArrowInvalid("k must be positive")
        query = numpy.array(asked["vector"], numpy.float32)
        size = table.schema.field("vector").type.list_size
        if len(query) != size:
            raise pyarrow.ArrowInvalid(
                f"dimension mismatch: expected {size}, got {len(query)}")
        column = table["vector"].combine_chunks()
        rows = column.flatten().to_numpy().reshape(-1, size)
        distances = numpy.sqrt(((rows - query) ** 2).sum(axis=1))
        best = numpy.argsort(distances, kind="stable")[: asked["k"]]
        ids = table["id"].to_pylist()
        ids = [ids[i] if isinstance(ids[i], int) else int(i) for i in best]
        scores = 1 / (1 + distances[best])
        # The worst first, as a store with shards does.
        batch = pyarrow.record_batch(
            {"id": pyarrow.array(ids[::-1], pyarrow.uint64()),
             "score": pyarrow.array(scores[::-1], pyarrow.float32())})
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue()


class Keys(flight.ServerMiddlewareFactory):
    def __init__(self, key):
        self.key = key

    def start_call(self, info, headers):
        if self.key and headers.get("authorization") != [f"Bearer {self.key}"]:
            raise flight.FlightUnauthenticatedError("invalid API key")


class Port(flight.FlightServerBase):
    def __init__(self, store, port, is_meta):
        location = f"grpc://127.0.0.1:{port}"
        super().__init__(location, middleware={"keys": Keys(store.options.api_key)})
        self.store = store
        self.is_meta = is_meta

    def do_put(self, context, descriptor, reader, writer):
        if self.is_meta:
            raise NotImplementedError("DoPut is not supported on MetaServer")
        if not descriptor.path:
            raise flight.FlightInternalError("missing flight descriptor path")
        self.store.put(descriptor.path[0].decode(), reader, writer)

    def do_get(self, context, ticket):
        return self.store.get(ticket.ticket.decode())

    def get_flight_info(self, context, descriptor):
        if not self.is_meta:
            raise NotImplementedError("use MetaServer")
        dataset = self.store.find(descriptor.path[0].decode())
        return flight.FlightInfo(pyarrow.schema([]), descriptor, [], len(dataset.landed), 0)

    def list_flights(self, context, criteria):
        if not self.is_meta:
            raise NotImplementedError("use MetaServer")
        filters = json.loads(criteria or b"{}").get("filters", [])
        for name, dataset in list(self.store.datasets.items()):
            if not all(self.store.listed(name, dataset, item) for item in filters):
                continue
            descriptor = flight.FlightDescriptor.for_path(name)
            yield flight.FlightInfo(pyarrow.schema([]), descriptor, [], -1, -1)

    def do_action(self, context, action):
        asked = json.loads(action.body.to_pybytes() or b"{}")
        if action.type == "check_readiness":
            return [json.dumps(self.store.readiness(asked.get("dataset"))).encode()]
        if action.type == "VectorSearch":
            return [self.store.search(asked)]
        raise NotImplementedError(f"unknown action {action.type}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-port", type=int, default=0)
    parser.add_argument("--meta-port", type=int, default=0)
    parser.add_argument("--folder")
    parser.add_argument("--land-ms", type=float, default=20)
    parser.add_argument("--slow-down", type=int, default=0)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--hang-after", type=int, default=0)
    parser.add_argument("--flip-bit-of", type=int)
    parser.add_argument("--meta-away-after", type=int, default=0)
    parser.add_argument("--api-key")
    store = Store(parser.parse_args())
    data = Port(store, store.options.data_port, False)
    store.open_meta(store.options.meta_port)
    print("ports", data.port, store.meta.port, flush=True)
    data.serve()


main()
