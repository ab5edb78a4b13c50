import asyncio

from common import BASE, KEY, MODEL, QUESTION, done, follow
from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def play():
    model = LiteLlm(model=f"openai/{MODEL}", api_base=BASE, api_key=KEY)
    runner = InMemoryRunner(LlmAgent(name="walker", model=model, tools=[follow]), app_name="walk")
    session = await runner.session_service.create_session(app_name="walk", user_id="u")
    question = types.Content(role="user", parts=[types.Part(text=QUESTION)])
    texts = []
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=question):
        texts += [part.text for part in (event.content.parts if event.content else []) or [] if part.text]
    return texts[-1]


done("google-adk", asyncio.run(play()))
