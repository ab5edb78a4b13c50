"""Turns that share a lot, and what a plan of them has to be, by a trie of whole prefixes."""

from random import Random

from hypothesis import strategies as st

from support.making import make_turn

EDGE_IDS = (0, 1, 255, 256, 2**16, 2**24, 2**31 - 2, 2**31 - 1)


def sequence(turn):
    return (*turn.prompt.tolist(), *turn.action.tolist())


@st.composite
def shared_turns(draw, *, max_turns=8, max_size=6, min_turns=0, min_action=0, alphabet=None):
    """Turns over a few tokens, many of them made from ones before: again, split elsewhere, shorter, longer, forked."""
    few_tokens = alphabet or range(draw(st.integers(1, 3)))
    num_turns, size = draw(st.integers(min_turns, max_turns)), draw(st.integers(1, max_size))
    return random_turns(Random(draw(st.integers(0, 2**16))), num_turns, size, min_action, few_tokens)


def random_turns(random, num_turns, size, min_action, alphabet):
    """Only sizes and a seed are drawn by hypothesis: a draw for every token takes longer than the tests do."""
    turns = []
    for _ in range(num_turns):
        before = list(sequence(random.choice(turns))) if turns else []
        kept = before[: random.randint(0, len(before))]
        fresh = random.choices(alphabet, k=random.randint(1 + min_action, 2 * size))
        tokens = random.choice([fresh, before, kept, [*kept, *random.choices(alphabet, k=random.randint(1, size))]])
        if len(tokens) < 1 + min_action:
            tokens = fresh
        border = random.randint(1, len(tokens) - min_action)
        turns.append(make_turn(tokens[:border], tokens[border:]))
    return turns


def prefixes_of(plan):
    """The whole prefix of every node, by following parents."""
    prefixes = []
    for node, (token, above) in enumerate(zip(plan.tokens.tolist(), plan.parent.tolist(), strict=True)):
        assert -1 <= above < node
        prefixes.append((*(prefixes[above] if above >= 0 else ()), token))
    return prefixes


def ancestors_of(plan):
    """Of every node, itself and what is above it."""
    found = []
    for node, above in enumerate(plan.parent.tolist()):
        found.append({node} | (found[above] if above >= 0 else set()))
    return found


def assert_lays_out(plan, turns, chosen):
    """The plan is the trie of the chosen turns, each prefix once, and finds their action tokens."""
    trie = {}
    for turn in chosen:
        tokens = sequence(turns[turn])
        for end in range(1, len(tokens) + 1):
            trie.setdefault(tokens[:end], len(trie))
    prefixes = prefixes_of(plan)
    assert len(prefixes) == plan.num_tokens == len(trie)
    assert set(prefixes) == set(trie)
    assert plan.depth.tolist() == [len(prefix) - 1 for prefix in prefixes]
    for node, prefix in enumerate(prefixes):
        below = [other for other, longer in enumerate(prefixes) if longer[: len(prefix)] == prefix]
        assert below == list(range(node, plan.exit[node]))
    assert sorted(plan.turns.tolist()) == sorted(chosen)
    assert plan.offsets.tolist()[0] == 0
    assert plan.offsets.tolist()[-1] == len(plan.action_nodes)
    for turn, nodes in actions_of(plan).items():
        tokens, border = sequence(turns[turn]), len(turns[turn].prompt)
        assert [prefixes[node] for node in nodes] == [tokens[:end] for end in range(border + 1, len(tokens) + 1)]


def actions_of(plan):
    """The nodes of the action tokens of each turn."""
    edges = zip(plan.turns.tolist(), plan.offsets.tolist(), plan.offsets.tolist()[1:], strict=False)
    return {turn: plan.action_nodes[start:end].tolist() for turn, start, end in edges}


def trained(turns):
    return [place for place, turn in enumerate(turns) if len(turn.action)]
