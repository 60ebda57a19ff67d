"""Loads the vectors of `bodkin embed --output arrow` into LanceDB, and prints the ids nearest to a
question, best first.

    pip install lancedb
    bodkin embed minilm -f notes.txt --output arrow -o notes.arrows
    bodkin embed minilm "Where are the keys?" > question.jsonl
    python3 lancedb_search.py notes.arrows question.jsonl FOLDER
"""

import json
import sys

import lancedb
import pyarrow

vectors, question, folder = sys.argv[1:]
rows = pyarrow.ipc.open_stream(vectors).read_all()
table = lancedb.connect(folder).create_table("notes", rows, mode="overwrite")
question = json.loads(open(question).readline())["embedding"]
for row in table.search(question).limit(3).to_list():
    print(row["id"])
