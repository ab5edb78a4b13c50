import json

import openai
from common import BASE, KEY, MODE, MODEL, QUESTION, SCHEMA, done, follow

client = openai.OpenAI(base_url=BASE, api_key=KEY)
FUNCTION = {"name": "follow", "description": "Tell where a name leads.", "parameters": SCHEMA}


def chat(streamed):
    messages = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        if streamed:
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = follow(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def parsed():
    import pydantic

    class Follow(pydantic.BaseModel):
        name: str

    messages = [{"role": "user", "content": QUESTION}]
    tools = [openai.pydantic_function_tool(Follow, name="follow", description="Tell where a name leads.")]
    while True:
        message = client.chat.completions.parse(model=MODEL, messages=messages, tools=tools).choices[0].message
        messages.append(message.model_dump(exclude_none=True, include={"role", "content"}))
        if not message.tool_calls:
            return message.content
        calls = [call.model_dump(exclude={"function": {"parsed_arguments"}}) for call in message.tool_calls]
        messages[-1]["tool_calls"] = calls
        for call in message.tool_calls:
            result = follow(call.function.parsed_arguments.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def respond(given, streamed):
    tools = [{"type": "function", **FUNCTION, "strict": False}]
    if not streamed:
        return client.responses.create(model=MODEL, tools=tools, **given)
    with client.responses.stream(model=MODEL, tools=tools, **given) as stream:
        return stream.get_final_response()


def responses(ids, streamed):
    items = [{"role": "user", "content": QUESTION}]
    given = {"input": items}
    while True:
        response = respond(given, streamed)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": follow(**json.loads(call.arguments))}
            for call in calls
        ]
        if ids:
            given = {"input": results, "previous_response_id": response.id}
        else:
            items += [item.model_dump(exclude_none=True) for item in response.output] + results
            given = {"input": items, "store": False}


MODES = {
    "chat": lambda: chat(False),
    "chat streamed": lambda: chat(True),
    "chat parsed": parsed,
    "responses with ids": lambda: responses(True, False),
    "responses with ids streamed": lambda: responses(True, True),
    "responses without ids": lambda: responses(False, False),
    "responses without ids streamed": lambda: responses(False, True),
}
done("openai", MODES[MODE]())
