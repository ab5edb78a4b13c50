import dspy
from common import BASE, KEY, MODEL, QUESTION, done, follow

dspy.configure(lm=dspy.LM(f"openai/{MODEL}", api_base=BASE, api_key=KEY, cache=False))
agent = dspy.ReAct("question -> answer", tools=[follow], max_iters=5)
done("dspy", agent(question=QUESTION).answer)
