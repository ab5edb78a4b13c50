from common import BASE, KEY, MODEL, QUESTION, done, follow
from strands import Agent, tool
from strands.models.openai import OpenAIModel

model = OpenAIModel(client_args={"base_url": BASE, "api_key": KEY}, model_id=MODEL)
agent = Agent(model=model, tools=[tool(follow)], callback_handler=None)
done("strands-agents", str(agent(QUESTION)).strip())
