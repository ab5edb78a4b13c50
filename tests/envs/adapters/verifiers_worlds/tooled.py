"""A taskset of verifiers for the tests, whose tool is a server of the library's."""

import verifiers.v1 as vf


class Row(vf.TaskData):
    answer: str


class Sum(vf.Task[Row]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return f"it is {a + b}"


class Config(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Rows(vf.Taskset[Sum, Config]):
    def load(self):
        yield Sum(Row(prompt="What is 17 + 25?", answer="42"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Sums(config.tools)]


__all__ = ["Rows"]

if __name__ == "__main__":
    Sums.run()
