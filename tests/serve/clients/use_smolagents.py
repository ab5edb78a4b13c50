from common import BASE, KEY, MODEL, QUESTION, done, follow
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

model = OpenAIServerModel(model_id=MODEL, api_base=BASE, api_key=KEY)
agent = ToolCallingAgent(tools=[tool(follow)], model=model, verbosity_level=0)
done("smolagents", agent.run(QUESTION))
