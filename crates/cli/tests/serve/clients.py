"""Drives a running server with the official clients of the interfaces that it speaks.

Usage: clients.py BASE_URL EMBEDDING_URL. The model is a tiny one with random weights, so that only
shapes, counts and determinism can be checked, not sense.
"""

import json
import sys
import time

import anthropic
import ollama
import openai

base, embedding_base = sys.argv[1:3]
MESSAGES = [{"role": "user", "content": "Hello there"}]
# Its answers end soon, whatever the model writes.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["one", "two"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


def check(condition, what):
    if not condition:
        raise SystemExit(f"clients.py: {what}")


def refused(call, error, field=None):
    """The call fails with this class of error, which names the field."""
    try:
        call()
    except error as found:
        check(field is None or field in str(found), f"{field} is not named: {found}")
        return found
    raise SystemExit(f"clients.py: accepted what should be refused: {field}")


def satisfies(text):
    """Whether a text is JSON that satisfies the schema."""
    value = json.loads(text)
    return set(value) == {"name", "kind"} and value["kind"] in ("one", "two")


def running():
    """Requests that the server is working on."""
    import urllib.request

    slots = json.load(urllib.request.urlopen(f"{base}/slots"))
    return sum(slot["is_processing"] for slot in slots)


def idle():
    """Waits until no request is running."""
    deadline = time.time() + 20
    while running() > 0:
        check(time.time() < deadline, "a cancelled request goes on")
        time.sleep(0.02)


def test_openai_chat():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    models = client.models.list().data
    check(len(models) == 1 and client.models.retrieve(models[0].id).id == models[0].id, "models")
    chat = client.chat.completions.create
    settings = dict(model="any", messages=MESSAGES, max_tokens=12, temperature=0)
    answer = chat(**settings)
    choice = answer.choices[0]
    check(choice.message.role == "assistant" and choice.finish_reason == "length", "an answer")
    usage = answer.usage
    check(usage.completion_tokens == 12, f"{usage}")
    check(usage.total_tokens == usage.prompt_tokens + 12, f"{usage}")
    check(chat(**settings).choices[0].message.content == choice.message.content, "same text again")
    # The same text in pieces, with its usage last.
    text, last = "", None
    for chunk in chat(**settings, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
            last = chunk.choices[0].finish_reason or last
        usage = chunk.usage
    check((text, last) == (choice.message.content, "length"), "a stream is the answer in pieces")
    check(usage.completion_tokens == 12, "a stream ends with its usage")
    # Several answers, each what its seed gives alone.
    drawn = dict(settings, temperature=1.5, seed=7)
    two = chat(**drawn, n=2).choices
    alone = [chat(**dict(drawn, seed=seed)).choices[0].message.content for seed in (7, 8)]
    check([c.message.content for c in sorted(two, key=lambda c: c.index)] == alone, "n and seed")
    # Log-probabilities.
    answer = chat(**settings, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    check(len(content) == 12, "a log-probability for each token")
    for token in content:
        check(len(token.top_logprobs) == 3, "as many as asked for")
        check(token.logprob == token.top_logprobs[0].logprob, "greedy takes the most probable")
        check(token.logprob <= 0, "a logarithm of a probability")
    # A bias decides.
    word = content[0].top_logprobs[2]
    bias = {str(word.model_extra["id"]): 100}
    endless = {"ignore_eos": True}
    biased = chat(**settings, logit_bias=bias, logprobs=True, extra_body=endless)
    check(biased.choices[0].logprobs.content[0].token == word.token, "logit_bias")
    # A stop string is not part of the answer.
    full = choice.message.content
    stop = full[len(full) // 2 :][:2]
    cut = chat(**settings, stop=[stop]).choices[0]
    check(cut.message.content == full[: full.index(stop)], "the text before the stop string")
    check(cut.finish_reason == "stop", "a stop string stops")


def test_openai_formats():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create
    settings = dict(model="any", messages=MESSAGES, max_tokens=300, temperature=2, seed=1)
    given = {"name": "a", "strict": True, "schema": SCHEMA}
    settings["response_format"] = {"type": "json_schema", "json_schema": given}
    choice = chat(**settings).choices[0]
    check(satisfies(choice.message.content) and choice.finish_reason == "stop", f"{choice}")
    pieces = [c.choices[0].delta.content or "" for c in chat(**settings, stream=True) if c.choices]
    check("".join(pieces) == choice.message.content, "a stream is the answer in pieces")
    settings["response_format"] = {"type": "json_object"}
    check(chat(**settings).choices[0].message.content.startswith("{"), "an object")
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    text = client.completions.create(model="any", prompt="a", extra_body=extra).choices[0].text
    check(text in ("yes", "no"), text)
    text = {"format": dict(FORMAT, name="a")}
    answer = client.responses.create(model="any", input="Hello", text=text)
    check(satisfies(answer.output_text) and answer.status == "completed", f"{answer}")
    check(answer.text.format.type == "json_schema", "the format is repeated")


def test_openai_errors():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions.create
    bad, settings = openai.BadRequestError, dict(model="any", messages=MESSAGES, max_tokens=4)
    refused(lambda: chat(**settings, response_format={"type": "xml"}), bad, "response_format.type")
    unknown = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}
    refused(lambda: chat(**settings, response_format=unknown), bad, "json_schema.schema")
    refused(lambda: chat(**settings, temperature="hot"), bad, "temperature")
    refused(lambda: chat(**settings, top_p=2), bad, "top_p")
    refused(lambda: chat(**settings, n=0), bad, "n")
    refused(lambda: chat(**settings, logit_bias={"999999999": 1}), bad, "logit_bias")
    refused(lambda: chat(**dict(settings, max_tokens=0)), bad, "max_")
    refused(lambda: chat(model="any", messages=[]), bad, "messages")
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused(lambda: chat(model="any", messages=[{"role": "user", "content": image}]), bad, "content")
    long = [{"role": "user", "content": "word " * 4000}]
    error = refused(lambda: chat(model="any", messages=long), bad, "context")
    check(error.body["type"] == "exceed_context_size_error", f"{error.body}")
    check(error.body["n_prompt_tokens"] > error.body["n_ctx"], f"{error.body}")
    # What is unknown is ignored.
    chat(**settings, extra_body={"no_such_field": {"a": 1}})
    refused(lambda: client.post("/no/such/path", cast_to=object), openai.NotFoundError)


def test_openai_cancel():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    body = {"ignore_eos": True}
    stream = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=100_000, stream=True, extra_body=body
    )
    for chunk, _ in zip(stream, range(5)):
        pass
    check(running() == 1, "a request is running")
    stream.close()
    idle()


def test_openai_completions():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    create = client.completions.create
    settings = dict(model="any", prompt="Once upon", max_tokens=8, temperature=0)
    answer = create(**settings)
    text = answer.choices[0].text
    check(answer.usage.completion_tokens == 8, "as many tokens as asked for")
    check(create(**settings, echo=True).choices[0].text == "Once upon" + text, "echo")
    check("".join(c.choices[0].text for c in create(**settings, stream=True)) == text, "a stream")
    logprobs = create(**settings, logprobs=2).choices[0].logprobs
    check(len(logprobs.tokens) == len(logprobs.token_logprobs) == 8, "log-probabilities")
    # As a harness scores texts.
    whole = create(**settings, echo=True, logprobs=2).choices[0].logprobs
    scored = create(**dict(settings, max_tokens=0), echo=True, logprobs=2).choices[0]
    check(scored.text == "Once upon" and scored.finish_reason == "length", f"{scored}")
    check(scored.logprobs.token_logprobs[0] is None, "the first token has no log-probability")
    prompt = scored.logprobs.token_logprobs
    check(whole.token_logprobs == prompt + logprobs.token_logprobs, "the prompt, then the answer")
    refused(lambda: create(**settings, suffix="end"), openai.BadRequestError, "suffix")
    prompts = ["Once upon", "a"]
    alone = [create(**dict(settings, prompt=prompt)).choices[0].text for prompt in prompts]
    both = create(**dict(settings, prompt=prompts)).choices
    check([choice.text for choice in both] == alone, "several prompts")


def test_openai_responses():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    create = client.responses.create
    settings = dict(model="any", input="Hello there", max_output_tokens=16, temperature=0)
    answer = create(**settings)
    check(answer.status == "incomplete", answer.status)
    check(answer.usage.output_tokens == 16, f"{answer.usage}")
    events = list(create(**settings, stream=True))
    check([e.sequence_number for e in events] == list(range(len(events))), "numbered events")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    check(text == answer.output_text == events[-1].response.output_text, "a stream is the answer")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello there"}]}]
    check(create(**dict(settings, input=items)).output_text == text, "a message in parts")
    refused(lambda: create(**settings, previous_response_id="resp_1"), openai.BadRequestError)


def test_anthropic():
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    create = client.messages.create
    settings = dict(model="any", max_tokens=10, messages=MESSAGES)
    settings["extra_body"] = {"temperature": 0}
    answer = create(**settings)
    check(answer.stop_reason == "max_tokens" and answer.content[0].type == "text", f"{answer}")
    check(answer.usage.output_tokens == 10, f"{answer.usage}")
    with client.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(text == answer.content[0].text == final.content[0].text, "a stream is the answer")
    check(final.stop_reason == "max_tokens" and final.usage.output_tokens == 10, f"{final}")
    count = client.messages.count_tokens(model="any", messages=MESSAGES).input_tokens
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    check(count == used, f"{count} counted, {used} used")
    stop = text[len(text) // 2 :][:2]
    cut = create(**settings, stop_sequences=[stop])
    check((cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop), f"{cut}")
    parts = [{"type": "text", "text": "Hello there"}]
    blocks = [{"role": "user", "content": parts}]
    check(create(**dict(settings, messages=blocks)).content[0].text == text, "blocks of text")
    formed = dict(settings, max_tokens=300)
    extra = {"output_config": {"format": FORMAT}}
    answer = create(**dict(formed, extra_body=extra))
    check(satisfies(answer.content[0].text) and answer.stop_reason == "end_turn", f"{answer}")
    bad = anthropic.BadRequestError
    refused(lambda: create(**dict(settings, messages=[])), bad, "messages")


def test_ollama():
    client = ollama.Client(host=base)
    name = client.list().models[0].model
    check(client.show(name).details.format == "gguf", "show")
    options = {"num_predict": 9, "temperature": 0}
    answer = client.chat(name, MESSAGES, options=options)
    check(answer.done and answer.done_reason == "length", f"{answer}")
    check(answer.eval_count == 9 and answer.total_duration > answer.load_duration, f"{answer}")
    pieces = list(client.chat(name, MESSAGES, options=options, stream=True))
    check("".join(p.message.content for p in pieces) == answer.message.content, "a stream")
    check([p.done for p in pieces] == [False] * (len(pieces) - 1) + [True], "one end")
    raw = client.generate(name, "Once upon", raw=True, options=options)
    check(raw.eval_count == 9 and raw.prompt_eval_count > 0, f"{raw}")
    client.generate(name, "Hi", system="Be brief", options=options)
    check(client.generate(name, "").done_reason == "load", "an empty prompt loads the model")
    check(client.ps().models[0].model == name, "ps")
    check(client.pull(name).status == "success", "a model that is there")
    refused(lambda: client.delete(name), ollama.ResponseError)
    formed = dict(options={"num_predict": 300, "temperature": 2}, format=SCHEMA)
    check(satisfies(client.chat(name, MESSAGES, **formed).message.content), "chat with a format")
    check(satisfies(client.generate(name, "Hi", **formed).response), "generate with a format")
    formed["format"] = "json"
    check(client.chat(name, MESSAGES, **formed).message.content.startswith("{"), "an object")
    refused(lambda: client.chat(name, MESSAGES, options={"top_p": 9}), ollama.ResponseError, "top_p")


def test_embeddings():
    client = openai.OpenAI(base_url=f"{embedding_base}/v1", api_key="none", max_retries=0)
    create = client.embeddings.create
    texts = ["one text", "another"]
    # The client asks for base64 by default.
    packed = create(model="any", input=texts).data
    plain = create(model="any", input=texts, encoding_format="float").data
    for a, b in zip(packed, plain):
        check(max(abs(x - y) for x, y in zip(a.embedding, b.embedding)) < 1e-6, "base64")
    check(abs(sum(x * x for x in plain[0].embedding) - 1) < 1e-4, "length 1")
    short = create(model="any", input=texts, dimensions=8, encoding_format="float").data[0]
    check(len(short.embedding) == 8, "dimensions")
    theirs = ollama.Client(host=embedding_base).embed("any", texts).embeddings
    difference = max(abs(x - y) for x, y in zip(theirs[1], plain[1].embedding))
    check(difference < 1e-6, "both interfaces give one vector")
    cut = ollama.Client(host=embedding_base).embed("any", texts, dimensions=8).embeddings
    check(max(abs(x - y) for x, y in zip(cut[0], short.embedding)) < 1e-6, "Ollama's dimensions")
    raw = ollama.Client(host=embedding_base).embeddings("any", "one text").embedding
    check(abs(sum(x * x for x in raw) - 1) > 0.1, "the older interface scales nothing")
    ids = create(model="any", input=[[5, 6, 7], [8]], encoding_format="float")
    check(ids.usage.prompt_tokens == 4 and len(ids.data) == 2, "token arrays")
    refused(lambda: create(model="any", input=""), openai.BadRequestError)
    bad = openai.BadRequestError
    refused(lambda: client.chat.completions.create(model="any", messages=MESSAGES), bad, "no text")


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(f"{name}: ok")
idle()
