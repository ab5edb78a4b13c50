from common import BASE, KEY, MODE, MODEL, QUESTION, done, follow
from pydantic_ai import Agent

if MODE == "anthropic":
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=BASE.removesuffix("/v1"), api_key=KEY))
else:
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if MODE == "responses" else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=BASE, api_key=KEY))
agent = Agent(model, tools=[follow])
done("pydantic-ai-slim", agent.run_sync(QUESTION).output)
