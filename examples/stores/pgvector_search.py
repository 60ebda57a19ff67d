"""Copies the vectors of `bodkin embed --output arrow` into Postgres with pgvector, and prints the
ids nearest to a question, best first. The Postgres is one of its own, in a folder.

    pip install pgserver pgvector psycopg[binary] pyarrow numpy
    bodkin embed minilm -f notes.txt --output arrow -o notes.arrows
    bodkin embed minilm "Where are the keys?" > question.jsonl
    python3 pgvector_search.py notes.arrows question.jsonl FOLDER
"""

import json
import sys

import numpy
import pgserver
import psycopg
import pyarrow
from pgvector.psycopg import register_vector

vectors, question, folder = sys.argv[1:]
rows = pyarrow.ipc.open_stream(vectors).read_all()
dimensions = rows.schema.field("vector").type.list_size
server = pgserver.get_server(folder)
with psycopg.connect(server.get_uri(), autocommit=True) as connection:
    connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    register_vector(connection)
    connection.execute("DROP TABLE IF EXISTS notes")
    connection.execute(
        f"CREATE TABLE notes (id text PRIMARY KEY, vector vector({dimensions}), text text)")
    with connection.cursor().copy(
            "COPY notes (id, vector, text) FROM STDIN WITH (FORMAT BINARY)") as copy:
        copy.set_types(["text", "vector", "text"])
        for batch in rows.to_batches():
            matrix = batch["vector"].flatten().to_numpy().reshape(-1, dimensions)
            for i, vector in enumerate(matrix):
                copy.write_row([str(batch["id"][i]), vector, batch["text"][i].as_py()])
    question = numpy.array(json.loads(open(question).readline())["embedding"], numpy.float32)
    for row in connection.execute(
            "SELECT id FROM notes ORDER BY vector <=> %s LIMIT 3", (question,)):
        print(row[0])
server.cleanup()
