import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import BASE, KEY, MODEL, QUESTION, done, follow

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


async def play():
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE, api_key=KEY, model_info={**INFO, "family": "unknown"}
    )
    result = await AssistantAgent("walker", client, tools=[follow], max_tool_iterations=5).run(task=QUESTION)
    await client.close()
    return result.messages[-1].content


done("autogen-agentchat", asyncio.run(play()))
