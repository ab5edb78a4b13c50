import anthropic
from common import BASE, KEY, MODE, MODEL, QUESTION, SCHEMA, done, follow

client = anthropic.Anthropic(base_url=BASE.removesuffix("/v1"), api_key=KEY)
TOOLS = [{"name": "follow", "description": "Tell where a name leads.", "input_schema": SCHEMA}]


def messages(streamed):
    conversation = [{"role": "user", "content": QUESTION}]
    given = {"model": MODEL, "max_tokens": 200, "tools": TOOLS}
    while True:
        if streamed:
            with client.messages.stream(messages=conversation, **given) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(messages=conversation, **given)
        conversation.append({"role": "assistant", "content": message.content})
        if message.stop_reason != "tool_use":
            return next(block.text for block in message.content if block.type == "text")
        uses = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": follow(**use.input)} for use in uses]
        conversation.append({"role": "user", "content": results})


def tool_runner():
    tool = anthropic.beta_tool(follow)
    first = [{"role": "user", "content": QUESTION}]
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=200, tools=[tool], messages=first)
    return runner.until_done().content[-1].text


MODES = {
    "messages": lambda: messages(False),
    "messages streamed": lambda: messages(True),
    "tool runner": tool_runner,
}
done("anthropic", MODES[MODE]())
