import instructor
import openai
import pydantic
from common import BASE, KEY, MODEL, QUESTION, done
from common import follow as lookup


class follow(pydantic.BaseModel):
    """Tell where a name leads."""

    name: str


class answer(pydantic.BaseModel):
    """Give the answer."""

    text: str


client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY), mode=instructor.Mode.TOOLS)
messages = [{"role": "user", "content": QUESTION}]
for kind in (follow, follow, answer):
    found, raw = client.create_with_completion(model=MODEL, messages=messages, response_model=kind, max_retries=0)
    message = raw.choices[0].message
    calls = [call.model_dump() for call in message.tool_calls]
    messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
    if kind is follow:
        [call] = message.tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": lookup(found.name)})
done("instructor", found.text)
