import json

import litellm
from common import BASE, KEY, MODE, MODEL, QUESTION, SCHEMA, done, follow

FUNCTION = {"name": "follow", "description": "Tell where a name leads.", "parameters": SCHEMA}
messages = [{"role": "user", "content": QUESTION}]
given = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY}
while True:
    answer = litellm.completion(
        messages=messages, tools=[{"type": "function", "function": FUNCTION}], stream=MODE == "streamed", **given
    )
    if MODE == "streamed":
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    messages.append(message.model_dump())  # with provider_specific_fields, as litellm's own documentation does
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = follow(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
done("litellm", message.content)
