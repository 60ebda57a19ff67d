"""Daft's `embed_text` and LangChain's embeddings against the server at a URL."""

import sys

import daft
from daft.ai.openai.provider import OpenAIProvider
from daft.functions import embed_text
from langchain_openai import OpenAIEmbeddings

url = sys.argv[1]
texts = ["one hen", "two hens", "the garden"]

# LangChain would send ids of OpenAI's vocabulary, which it downloads: docs/serving.md.
client = OpenAIEmbeddings(base_url=url, api_key="none", model="bert",
                          check_embedding_ctx_length=False)
wanted = client.embed_documents(texts)
assert [len(vector) for vector in wanted] == [64] * 3
assert client.embed_query(texts[1]) == wanted[1]

provider = OpenAIProvider(name="local", base_url=url, api_key="none")
frame = daft.from_pydict({"text": texts})
frame = frame.with_column("vector", embed_text(daft.col("text"), provider=provider, model="bert"))
for vector, other in zip(frame.to_pydict()["vector"], wanted):
    assert max(abs(a - b) for a, b in zip(vector, other)) < 1e-6
