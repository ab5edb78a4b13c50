import pytest
import torch

from turnwise.learn.losses import LOSSES, ppo_clip
from turnwise.learn.objective import DIVERGENCES, Objective, k2, k3

POLICY = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.2, 0.4, 0.9], dtype=torch.float64).log_softmax(0)


def expected_gradient(term):
    """Over all actions of a small policy, each as likely as the policy makes it: what sampling would find."""
    logits = POLICY.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    (logprobs.detach().exp() * term(logprobs, REFERENCE)).sum().backward()
    return logits.grad


def true_gradient(divergence):
    logits = POLICY.clone().requires_grad_()
    divergence(logits.log_softmax(0)).backward()
    return logits.grad


def kl(logprobs):
    return (logprobs.exp() * (logprobs - REFERENCE)).sum()


def kl_the_other_way(logprobs):
    return (REFERENCE.exp() * (REFERENCE - logprobs)).sum()


def test_k2_has_the_gradient_of_the_divergence():
    assert torch.allclose(expected_gradient(k2), true_gradient(kl), rtol=0, atol=1e-14)


def test_k3_has_the_gradient_of_the_divergence_the_other_way():
    found = expected_gradient(k3)
    assert torch.allclose(found, true_gradient(kl_the_other_way), rtol=0, atol=1e-14)
    assert not torch.allclose(found, true_gradient(kl), rtol=0, atol=1e-2)


def test_k1_as_a_loss_has_no_gradient_at_all():
    """Which is why it is not among the divergences."""
    assert expected_gradient(lambda logprobs, reference: logprobs - reference).abs().max() < 1e-15
    assert set(DIVERGENCES) == {"k2", "k3"}


def test_k3_estimates_the_divergence_itself():
    logprobs = POLICY.log_softmax(0)
    assert float((logprobs.exp() * k3(logprobs, REFERENCE)).sum()) == pytest.approx(float(kl(logprobs)), rel=1e-12)
    assert (k3(logprobs, REFERENCE) >= 0).all()


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
def test_terms_add_up(divergence):
    random = torch.Generator().manual_seed(0)
    old, advantages, reference, entropies = (torch.rand(5, dtype=torch.float64, generator=random) for _ in range(4))
    old, reference = -old, -reference
    logprobs = (old + 0.1).clone().requires_grad_()
    entropies.requires_grad_()
    objective = Objective(ppo_clip, entropy=0.3, kl=0.7, divergence=DIVERGENCES[divergence])
    terms, measured = objective(logprobs, entropies, old, advantages, reference)
    policy, of_policy = ppo_clip(logprobs, old, advantages)
    wanted = policy - 0.3 * entropies + 0.7 * DIVERGENCES[divergence](logprobs, reference)
    assert torch.equal(terms, wanted)
    terms.sum().backward()
    assert torch.allclose(entropies.grad, torch.full((5,), -0.3, dtype=torch.float64))
    assert set(measured) == {"entropy", "kl", *of_policy}
    assert torch.equal(measured["kl"], k3(logprobs.detach(), reference))
    assert not any(values.requires_grad for values in measured.values())


def test_the_divergence_from_a_teacher_is_added_where_it_is_given():
    old, advantages, entropies = (torch.rand(3, dtype=torch.float64) for _ in range(3))
    apart = torch.tensor([0.5, 1.0, 0.0], dtype=torch.float64, requires_grad=True)
    objective = Objective(ppo_clip, distill=0.3)
    terms, measured = objective(old, entropies, old, advantages, None, apart)
    assert torch.equal(terms, ppo_clip(old, old, advantages)[0] + 0.3 * apart)
    assert measured["distill"].tolist() == apart.tolist()
    assert not measured["distill"].requires_grad
    assert "distill" not in objective(old, entropies, old, advantages, None)[1]


@pytest.mark.parametrize("name", LOSSES)
def test_without_coefficients_it_is_the_loss(name):
    old, advantages, entropies = (torch.rand(3, dtype=torch.float64) for _ in range(3))
    logprobs = old.clone().requires_grad_()
    terms, measured = Objective(LOSSES[name].function)(logprobs, entropies, old, advantages, None)
    assert torch.equal(terms, LOSSES[name].function(logprobs, old, advantages)[0])
    assert "kl" not in measured
