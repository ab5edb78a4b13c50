"""What benchmarks/async_training.py says of a curve, and the clock that its runs have."""

import asyncio
import math

import pytest

from support.scripts import scripts_by_name


@pytest.fixture(scope="module")
def modules():
    with scripts_by_name():
        import async_training
        import cpu_clock

        yield async_training, cpu_clock


CURVE = {
    "success": [0.1, 0.9, 0.8, 1.0, 1.0, 0.2],
    "updates": [1, 2, 3, 4, 5, 6],
    "tokens": [10, 20, 30, 40, 50, 60],
    "seconds": [2.0, 4.0, 6.0, 8.0, 10.0, 30.0],
}


def test_success_is_reached_where_three_steps_together_have_it(modules):
    script, _ = modules
    assert {name: script.reached(CURVE, name) for name in script.AXES} == {"updates": 4, "tokens": 40, "seconds": 8.0}
    assert math.isnan(script.reached({**CURVE, "success": [0.5] * 6}, "updates"))


def test_the_last_step_is_not_timed(modules):
    script, _ = modules
    assert script.step_seconds(CURVE) == 2.0


def test_success_by_some_second_is_of_the_steps_that_had_ended(modules):
    script, _ = modules
    assert script.success_at(CURVE, 6.5) == pytest.approx(0.6)
    assert script.success_at(CURVE, 100.0) == pytest.approx((1.0 + 1.0 + 0.2) / 3)


def test_lags_are_compared_on_seeds_that_all_have(modules):
    script, _ = modules
    cells = [(0, 0.0, 0), (0, 0.1, 0), (2, 0.1, 0), (0, 0.1, 1)]
    runs = [{"cell": {"lag": lag, "scale": scale, "seed": seed}} for lag, scale, seed in cells]
    assert {lag: list(of_lag) for lag, of_lag in script.by_lag(runs).items()} == {0: [0], 2: [0]}


def test_the_clock_jumps_over_waiting_and_counts_what_workers_compute(modules):
    _, clock = modules
    workers = clock.CpuWorkers()

    async def both():
        loop = asyncio.get_running_loop()
        began = loop.time()
        work = workers.worker("learner")
        assert await work(sum, range(200_000)) == sum(range(200_000))
        worked = loop.time()
        await asyncio.sleep(1000.0)
        return worked - began, loop.time() - worked

    with asyncio.Runner(loop_factory=clock.CpuLoop) as runner:
        worked, slept = runner.run(both())
    assert worked >= workers.spent["learner"] > 0
    assert 1000.0 <= slept < 1001.0
