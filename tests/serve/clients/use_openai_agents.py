import asyncio

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from common import BASE, KEY, MODE, MODEL, QUESTION, done, follow
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=BASE, api_key=KEY)
kind = OpenAIChatCompletionsModel if MODE == "chat" else OpenAIResponsesModel
agent = Agent("walker", tools=[function_tool(follow)], model=kind(MODEL, client))


async def play():
    given = {"auto_previous_response_id": True} if MODE == "responses with ids" else {}
    if MODE != "responses streamed":
        return await Runner.run(agent, QUESTION, **given)
    running = Runner.run_streamed(agent, QUESTION)
    async for _ in running.stream_events():
        pass
    return running


done("openai-agents", asyncio.run(play()).final_output)
