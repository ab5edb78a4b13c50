import asyncio

from common import BASE, KEY, MODEL, QUESTION, done, follow
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=MODEL, api_base=BASE, api_key=KEY, is_chat_model=True, is_function_calling_model=True, context_window=4000
)


async def play():
    return await FunctionAgent(tools=[follow], llm=llm).run(QUESTION)


done("llama-index-core", asyncio.run(play()))
