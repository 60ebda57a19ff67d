"""Drives a running server with the official clients of the interfaces that it speaks: tools.

Usage: tools.py BASE_URL. The model is a tiny one with random weights and a chat template with
tools: it calls what it must call, with arguments of its own, and nothing by itself.
"""

import json
import sys

import anthropic
import ollama
import openai

base = sys.argv[1]
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
}
OTHER = {"type": "object", "properties": {}}


def check(condition, what):
    if not condition:
        raise SystemExit(f"tools.py: {what}")


def refused(call, error, text):
    """The call fails with this class of error, which says this."""
    try:
        call()
    except error as found:
        check(text in str(found), f"{text} is not said: {found}")
        return
    raise SystemExit(f"tools.py: accepted what should be refused: {text}")


def satisfies(arguments):
    """Whether arguments satisfy the schema."""
    return (
        set(arguments) == {"city", "days"}
        and arguments["city"] in ("Paris", "Rome")
        and arguments["days"] in (1, 2, 3)
    )


def function(name, parameters):
    return {"name": name, "description": f"The {name}.", "parameters": parameters}


def chat_tools():
    both = [function("weather", PARAMETERS), function("clock", OTHER)]
    return [{"type": "function", "function": given} for given in both]


def test_openai_chat():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    settings = dict(model="any", messages=MESSAGES, tools=chat_tools(), max_tokens=400)
    weather = {"type": "function", "function": {"name": "weather"}}
    answer = create(**settings, tool_choice=weather, parallel_tool_calls=False, seed=1)
    choice = answer.choices[0]
    check(choice.finish_reason == "tool_calls", f"{choice}")
    check(choice.message.content is None and len(choice.message.tool_calls) == 1, f"{choice}")
    call = choice.message.tool_calls[0]
    check(call.type == "function" and call.id.startswith("call_"), f"{call}")
    check(call.function.name == "weather", f"{call}")
    check(satisfies(json.loads(call.function.arguments)), f"{call}")
    # The same in pieces.
    single = dict(settings, tool_choice=weather, parallel_tool_calls=False, seed=1)
    calls, reason = [], None
    for chunk in create(**single, stream=True):
        for piece in chunk.choices:
            check(not piece.delta.content, f"{piece}")
            calls += piece.delta.tool_calls or []
            reason = piece.finish_reason or reason
    check(reason == "tool_calls" and len(calls) == 1 and calls[0].index == 0, f"{calls}")
    check(calls[0].function == calls[0].function.__class__(**call.function.model_dump()), f"{calls}")
    # The client's own helper joins the pieces.
    with client.chat.completions.stream(**single) as stream:
        whole = stream.get_final_completion().choices[0].message.tool_calls[0]
    check(whole.function.arguments == call.function.arguments, f"{whole}")
    # Any of both, and several.
    counts = set()
    for seed in range(12):
        choice = create(**settings, tool_choice="required", temperature=2, seed=seed).choices[0]
        calls = choice.message.tool_calls or []
        if choice.finish_reason == "length":
            continue
        check(choice.finish_reason == "tool_calls" and calls, f"{choice}")
        for call in calls:
            arguments = json.loads(call.function.arguments)
            fits = satisfies(arguments) if call.function.name == "weather" else arguments == {}
            check(fits, f"{call}")
        check(len({call.id for call in calls}) == len(calls), "ids differ")
        counts.add(len(calls))
    check(counts, "no answer was whole")
    # Only those that are allowed.
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    allowed = {"type": "allowed_tools", "allowed_tools": allowed}
    choice = create(**settings, tool_choice=allowed, parallel_tool_calls=False).choices[0]
    check(choice.message.tool_calls[0].function.name == "clock", f"{choice}")
    # By itself it calls nothing, and it must not.
    for given in ("auto", "none"):
        choice = create(**dict(settings, max_tokens=8), tool_choice=given).choices[0]
        check(not choice.message.tool_calls and choice.finish_reason != "tool_calls", f"{choice}")
    # The call and its result go back.
    message = create(**single).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    history = MESSAGES + [message, result]
    answer = create(**dict(settings, messages=history, max_tokens=8))
    check(answer.usage.completion_tokens > 0, f"{answer}")
    parts = dict(result, content=[{"type": "text", "text": "21 degrees"}])
    again = create(**dict(settings, messages=MESSAGES + [message, parts], max_tokens=8))
    check(again.usage.prompt_tokens == answer.usage.prompt_tokens, "a result in parts")
    # A form is the alternative to a call.
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    given = {"name": "a", "schema": dict(schema, additionalProperties=False)}
    formed = dict(settings, response_format={"type": "json_schema", "json_schema": given})
    message = create(**formed).choices[0].message
    check(message.tool_calls or json.loads(message.content) == {"a": 1}, f"{message}")
    bad = openai.BadRequestError
    refused(lambda: create(**formed, tool_choice="required"), bad, "response_format")


def test_openai_responses():
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    create = client.responses.create
    tools = [dict(type="function", **tool["function"]) for tool in chat_tools()]
    settings = dict(model="any", tools=tools, max_output_tokens=400, extra_body={"seed": 3})
    settings.update(input="Weather?", tool_choice={"type": "function", "name": "weather"})
    settings["parallel_tool_calls"] = False
    answer = create(**settings)
    check(answer.status == "completed" and answer.tools[0].name == "weather", f"{answer}")
    check([item.type for item in answer.output] == ["function_call"], f"{answer.output}")
    call = answer.output[0]
    check(call.name == "weather" and satisfies(json.loads(call.arguments)), f"{call}")
    events = list(create(**settings, stream=True))
    check([e.sequence_number for e in events] == list(range(len(events))), "numbered events")
    check(
        [e.type for e in events]
        == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ],
        f"{[e.type for e in events]}",
    )
    check(events[3].delta == events[4].arguments == call.arguments, f"{events[3]}")
    check(events[-1].response.output[0].arguments == call.arguments, f"{events[-1]}")
    history = [{"role": "user", "content": "Weather?"}, call]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
    going_on = dict(settings, input=history, max_output_tokens=16, tool_choice="auto")
    check(create(**going_on).output[0].type == "message", "an answer to a result")
    counted = client.post(
        "/responses/input_tokens", cast_to=object, body={"input": history, "tools": tools}
    )
    check(counted["input_tokens"] > 0, f"{counted}")
    bad = openai.BadRequestError
    search = dict(settings, tools=[{"type": "web_search"}])
    refused(lambda: create(**search), bad, "tools[0].type: expected function, found web_search")


def test_anthropic():
    client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    create = client.messages.create
    tools = [
        {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS},
        {"name": "clock", "input_schema": OTHER, "cache_control": {"type": "ephemeral"}},
    ]
    settings = dict(model="any", max_tokens=400, messages=MESSAGES, tools=tools)
    settings["system"] = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
    settings["extra_body"] = {"seed": 3}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    answer = create(**settings, tool_choice=choice)
    check(answer.stop_reason == "tool_use" and len(answer.content) == 1, f"{answer}")
    block = answer.content[0]
    check(block.type == "tool_use" and block.id.startswith("toolu_"), f"{block}")
    check(block.name == "weather" and satisfies(block.input), f"{block}")
    with client.messages.stream(**settings, tool_choice=choice) as stream:
        final = stream.get_final_message()
    check(final.stop_reason == "tool_use" and final.content[0].input == block.input, f"{final}")
    some = create(**settings, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    check(some.content[0].name in ("weather", "clock"), f"{some}")
    # The call and its result go back.
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"}
    text = {"type": "text", "text": "Go on."}
    history = MESSAGES + [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, text]},
    ]
    going_on = dict(settings, messages=history, max_tokens=8)
    answer = create(**going_on)
    check(answer.content[0].type == "text", f"{answer}")
    count = client.messages.count_tokens
    with_tools = count(model="any", messages=history, tools=tools, system=settings["system"])
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    check(with_tools.input_tokens == used, f"{with_tools} counted, {used} used")
    without = count(model="any", messages=history, system=settings["system"])
    check(without.input_tokens < used, "tools are tokens")
    bad = anthropic.BadRequestError
    refused(lambda: create(**dict(settings, tools=[{"name": "a b"}])), bad, "tools[0].name")
    other = {"type": "tool", "name": "none"}
    refused(lambda: create(**settings, tool_choice=other), bad, "tool_choice")


def test_ollama():
    client = ollama.Client(host=base)
    name = client.list().models[0].model
    check("tools" in client.show(name).capabilities, "a model with tools")
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}]
    history = MESSAGES + [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "21 degrees", "tool_name": "weather"},
    ]
    options = {"num_predict": 8}
    answer = client.chat(name, history, tools=chat_tools(), options=options)
    alone = client.chat(name, history, options=options)
    check(answer.prompt_eval_count > alone.prompt_eval_count, "tools are tokens")
    pieces = list(client.chat(name, history, tools=chat_tools(), options=options, stream=True))
    check(pieces[-1].done, f"{pieces[-1]}")
    bad = [{"type": "function", "function": {"parameters": OTHER}}]
    refused(lambda: client.chat(name, MESSAGES, tools=bad), ollama.ResponseError, "tools[0]")


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print(f"{name}: ok")
