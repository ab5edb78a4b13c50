"""Many sessions at once: no token in the wrong one, and memory that does not grow with what was served."""

import asyncio
import gc
import re
import resource

import httpx2
import numpy as np

from serve.serving import agent_of, driven, hermes, judged
from support.acting import run, says
from turnwise.rollout.scene import Attempt
from turnwise.serve.call import ServedCall
from turnwise.serve.endpoint import Endpoint
from turnwise.serve.session import Session
from turnwise.types import Break, Status, Task

SESSIONS, TURNS = 200, 4
SECRET = re.compile(r"secret-[0-9a-f]{8}")
CALM = {"call_seconds": 60.0, "attempt_seconds": 100.0, "max_turns": TURNS}


async def echo(prompt, session, seed):
    """The secret of the conversation, after a moment in which others get their word in."""
    await asyncio.sleep(seed % 5 / 1000)
    [secret] = set(SECRET.findall(hermes().decode(prompt.tolist())))
    return f"{secret} {seed}"


def make_agent(client):
    async def agent(task, base_url, api_key, model):
        messages = [{"role": "user", "content": task.data["secret"]}]
        for _ in range(TURNS):
            response = await client.post(
                f"{base_url}/chat/completions",
                json={"model": model, "messages": messages, "stream": len(messages) % 4 == 3},
                headers={"authorization": f"Bearer {api_key}"},
            )
            response.raise_for_status()
            streamed = response.headers["content-type"].startswith("text/event-stream")
            said = from_events(response.text) if streamed else response.json()["choices"][0]["message"]["content"]
            assert SECRET.findall(said) == [task.data["secret"]]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "on"}]
        return said

    return agent_of(agent)


def from_events(text):
    return "".join(re.findall(r'"content": "([^"]*)"', text))


async def many(endpoint, numbers):
    engine = says(echo, render=hermes())
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=SESSIONS)) as client:
        agent = make_agent(client)
        tasks = [Task(f"t-{number}", "hops", {"secret": f"secret-{number:08x}"}) for number in numbers]
        made = await asyncio.gather(
            *(
                driven(agent, judged(), engine, endpoint=endpoint, which=Attempt(0, "train", task), **CALM)
                for task in tasks
            )
        )
    return tasks, made, engine


def test_two_hundred_sessions_and_no_token_in_the_wrong_one():
    async def work():
        endpoint = Endpoint()
        try:
            await many(endpoint, range(8))  # what is loaded once
            before = peak_memory()
            tasks, made, engine = await many(endpoint, range(SESSIONS))
            check(tasks, made, engine)
            return peak_memory() - before, len(endpoint.registry.sessions)
        finally:
            endpoint.close()

    grown, left = run(work(), 110)
    assert left == 0
    assert grown < 200 << 20
    gc.collect()
    assert [thing for thing in gc.get_objects() if type(thing) in (Session, ServedCall)] == []  # nothing is kept


def peak_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def check(tasks, made, engine):
    render = hermes()
    asked = {prompt.tobytes() for prompt in engine.prompts}
    for task, trajectory in zip(tasks, made, strict=True):
        assert trajectory.status is Status.finished
        assert len(trajectory.turns) == TURNS
        which = Attempt(0, "train", task)
        for number, turn in enumerate(trajectory.turns):
            assert turn.broke is Break.none
            assert turn.prompt.tobytes() in asked
            text = f"{task.data['secret']} {which.noise(number)}"
            assert turn.action.tolist() == [*render.encode(text).tolist(), render.end_token]
            assert set(SECRET.findall(render.decode(turn.prompt.tolist()))) == {task.data["secret"]}
    assert len(engine.prompts) == len(tasks) * TURNS
    assert len(np.unique([turn.action.tobytes() for t in made for turn in t.turns])) == len(tasks) * TURNS
