"""How many rows of an Arrow stream that ends anywhere can be read."""

import sys

import pyarrow

rows = 0
try:
    for batch in pyarrow.ipc.open_stream(sys.argv[1]):
        rows += batch.num_rows
except (OSError, pyarrow.ArrowInvalid):
    pass
print(rows)
