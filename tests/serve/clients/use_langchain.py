from common import BASE, KEY, MODE, MODEL, QUESTION, done, follow
from langchain_openai import ChatOpenAI

given = {"model": MODEL, "base_url": BASE, "api_key": KEY}
if MODE == "langchain, anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=MODEL, base_url=BASE.removesuffix("/v1"), api_key=KEY, max_tokens=200)
elif MODE == "langchain, responses":
    model = ChatOpenAI(**given, use_responses_api=True)
elif MODE == "langchain, responses with ids":
    model = ChatOpenAI(**given, use_responses_api=True, use_previous_response_id=True)
else:
    model = ChatOpenAI(**given, streaming=MODE.endswith("streamed"))

if MODE.startswith("langgraph"):
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(follow)]
    bound = model.bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [bound.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    result = graph.compile().invoke({"messages": [{"role": "user", "content": QUESTION}]})
    done("langgraph", result["messages"][-1].text)
else:
    from langchain.agents import create_agent

    agent = create_agent(model, [follow])
    result = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    done("langchain", result["messages"][-1].text)
