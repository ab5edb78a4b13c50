import numpy as np
import pytest
import torch

from support.making import distance, make_model, make_turns
from turnwise.learn.critic import FOLDER, Critic, ValueModel, squared_error
from turnwise.learn.snapshot import write_snapshot
from turnwise.learn.stepper import OptimizerSettings
from turnwise.plan.cut import cut
from turnwise.plan.pack import pack

TURNS = [
    *make_turns([(5, 3), (2, 1), (4, 4)], seed=1),
    *make_turns([(7, 2), (3, 5)], growing=False, seed=2),
    *make_turns([(3, 0), (1, 2)], seed=3),
]


def make_critic(*, dtype="float64", learning_rate=1e-2, clip=0.2, seed=0):
    values = ValueModel(make_model(dtype=dtype, seed=seed), dtype=getattr(torch, dtype))
    with torch.no_grad():
        values.head.weight.copy_(torch.linspace(-1, 1, values.head.weight.numel()).reshape(1, -1))
        values.head.bias.fill_(0.25)
    return Critic(values, OptimizerSettings(learning_rate, clip_norm=1e9), lambda update: 1.0, clip=clip)


def values_of(critic, plans):
    """By turn."""
    found = {}
    for plan in plans:
        flat = np.zeros(len(plan.action_nodes))
        with torch.no_grad():
            for picked, values, _ in critic.model.passes(plan):
                flat[picked] = values.numpy()
        for turn, part in zip(plan.turns, np.split(flat, plan.offsets[1:-1]), strict=True):
            found[int(turn)] = part
    return [found.get(place, np.zeros(0)) for place in range(len(TURNS))]


def test_a_value_is_of_the_state_before_a_token():
    """The first of a turn is that of its prompt, whatever was sampled then."""
    critic = make_critic()
    model = critic.model.model
    model.set_attn_implementation("sdpa")
    wanted = []
    with torch.no_grad():
        for turn in TURNS:
            row = torch.tensor(np.concatenate([turn.prompt, turn.action]))[None].long()
            hidden = model.base_model(input_ids=row, use_cache=False).last_hidden_state[0]
            states = hidden[len(turn.prompt) - 1 : len(turn.prompt) + len(turn.action) - 1]
            wanted.append(critic.model.head(states)[:, 0].numpy())
    found = values_of(make_critic(), cut(TURNS, 1000))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def gradient_after(plans):
    critic = make_critic(learning_rate=0.0)
    random = np.random.default_rng(0)
    targets, weights, old = ([random.normal(size=len(turn.action)) for turn in TURNS] for _ in range(3))
    metrics = critic.update(plans, targets, [np.abs(weight) for weight in weights], old)
    return metrics, torch.cat([p.grad.flatten() for p in critic.model.parameters if p.grad is not None])


@pytest.mark.parametrize("plans", [cut(TURNS, 1000), cut(TURNS, 25), cut(TURNS, 9)], ids=["tree", "cut", "handed over"])
def test_an_update_does_not_depend_on_the_layout(plans):
    metrics, gradient = gradient_after(plans)
    plain, wanted = gradient_after(pack(TURNS, 1000))
    assert distance(gradient, wanted) < 1e-12
    assert metrics["critic/loss"] == pytest.approx(plain["critic/loss"], rel=1e-12)
    assert metrics["critic/clipped"] > 0


@pytest.mark.parametrize(
    ("value", "target", "old", "term", "slope"),
    [
        (1.0, 3.0, 1.0, 2.0, -2.0),
        (1.3, 3.0, 1.0, 0.5 * 1.8**2, 0.0),  # moved further than it may: no more to gain
        (0.5, 3.0, 1.0, 0.5 * 2.5**2, -2.5),  # the wrong way is never bounded
        (2.0, 1.0, 1.0, 0.5, 1.0),
    ],
)
def test_the_clip_of_values(value, target, old, term, slope):
    leaf = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    wanted, before = (torch.tensor([x], dtype=torch.float64) for x in (target, old))
    terms, _ = squared_error(leaf, wanted, before, 0.2)
    terms.sum().backward()
    assert float(terms.detach()[0]) == pytest.approx(term)
    assert float(leaf.grad[0]) == pytest.approx(slope)


def test_a_critic_learns_its_targets():
    critic = make_critic(dtype="float32", learning_rate=3e-3, clip=10.0)
    plans = cut(TURNS, 1000)
    targets = [np.linspace(-1, 1, len(turn.action)) + place for place, turn in enumerate(TURNS)]
    size = sum(len(turn.action) for turn in TURNS)
    weights = [np.full(len(turn.action), 1 / size) for turn in TURNS]
    errors = [critic.update(plans, targets, weights, values_of(critic, plans))["critic/error"] for _ in range(60)]
    assert errors[-1] < errors[0] / 5


def test_a_new_critic_expects_nothing():
    model = ValueModel(make_model(dtype="float64"), dtype=torch.float64)
    critic = Critic(model, OptimizerSettings(1e-3), lambda update: 1.0)
    assert not np.concatenate(values_of(critic, cut(TURNS, 1000))).any()


def test_a_restored_critic_continues_bit_for_bit(tmp_path):
    plans = cut(TURNS, 1000)
    targets = [np.ones(len(turn.action)) for turn in TURNS]
    critic, other = make_critic(), make_critic(seed=5)
    critic.update(plans, targets, targets, targets)
    write_snapshot(tmp_path / FOLDER, critic.state())
    other.restore(tmp_path)
    for each in (critic, other):
        each.update(plans, targets, targets, targets)
    for one, two in zip(values_of(critic, plans), values_of(other, plans), strict=True):
        assert one.tolist() == two.tolist()


def test_a_clip_is_over_zero():
    with pytest.raises(ValueError, match="critic.clip must be over 0"):
        make_critic(clip=0.0)
