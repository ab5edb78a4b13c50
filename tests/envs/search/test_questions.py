import pytest

from support.worlds import invented_factbook
from turnwise.data.factbook import FACTBOOK
from turnwise.envs.search.questions import ATTRIBUTES, LINKS, UNFOUND, read_atlas
from turnwise.envs.split import is_heldout


@pytest.fixture
def atlas(tmp_path):
    return read_atlas(invented_factbook(tmp_path))


BY_NOUN = {relation.noun: relation for relation in (*ATTRIBUTES, *LINKS)}


@pytest.mark.parametrize(
    ("noun", "parts", "said"),
    [
        ("capital", {"name": "Jerusalem: note - Israel proclaimed"}, ("Jerusalem",)),
        ("capital", {"name": "Suva (on Viti Levu)"}, ("Suva",)),
        ("capital", {"name": "none"}, ()),
        ("highest point", {"highest point": "Mont Blanc 4,807 m"}, ("Mont Blanc",)),
        ("highest point", {"highest point": "unnamed elevation 53 m"}, ()),
        ("internet country code", {"": ".fj"}, (".fj",)),
        ("currency code", {"": "nairas (NGN) per US dollar -; 157.3 (2014 est.)"}, ("NGN",)),
        ("national anthem", {"name": '"O Canada"'}, ("O Canada",)),
        ("length of the coastline", {"": "4,853 km"}, ("4,853 km", "4,853")),
        ("length of the coastline", {"": "0 km (landlocked)"}, ()),
        ("date of independence", {"": "1 October 1960 (from the UK)"}, ("1 October 1960",)),
        ("largest export partner", {"": "Germany 16.9%, Belgium 7.5% (2014)"}, ("Germany",)),
        ("largest export partner", {"": "Germany 7.5%, Belgium 7.5% (2014)"}, ()),
        ("neighbour with the longest common border", {"border countries": "Chad 85 km, Niger 1,608 km"}, ("Niger",)),
    ],
)
def test_what_pages_say(noun, parts, said):
    assert BY_NOUN[noun].read(parts) == said


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_questions_take_so_many_searches_and_are_all_different(atlas, hops):
    questions = [*atlas.questions("train", hops), *atlas.questions("heldout", hops)]
    assert len(questions) > 100
    assert {len(question.steps) for question in questions} == {hops}
    assert len({question.text for question in questions}) == len(questions)


def test_nothing_held_out_is_met_in_training(atlas):
    heldout = {name for name in atlas.countries if is_heldout(f"country {name}")}
    assert 0 < len(heldout) < len(atlas.countries) / 2
    for hops in (1, 2, 3):
        for question in atlas.questions("train", hops):
            said = {word.strip("?") for word in question.text.split()} | {step.means for step in question.steps}
            assert not said & heldout
        for question in atlas.questions("heldout", hops):
            assert any(question.steps[-1].query.startswith(f"{name} ") for name in heldout)


def test_a_chain_leads_from_one_step_to_the_next(atlas):
    question = next(q for q in atlas.questions("train", 3) if "whose capital" in q.text)
    first, second, third = question.steps
    assert first.query.startswith("Capital Town")
    assert second.query.startswith(f"{first.means} ")
    assert third.query.startswith(f"{second.means} ")
    assert third.means == question.answers[0]


@pytest.mark.slow
def test_the_real_factbook_answers_every_question(real_factbook):
    """Every step of every question is found by its query, and every query that is left out would not be."""
    from turnwise.envs.search import questions
    from turnwise.envs.search.env import contains_words, passages_text
    from turnwise.envs.search.retrieval.corpus import Corpus, corpus_file
    from turnwise.envs.search.retrieval.index import Bm25
    from turnwise.envs.search.retrieval.service import passage_of

    corpus = Corpus(corpus_file("factbook"))
    assert len(corpus) == 36_653
    index = Bm25.of(corpus)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "UNFOUND", frozenset())
        made = [
            q
            for split in ("train", "heldout")
            for n in (1, 2, 3)
            for q in read_atlas(real_factbook).questions(split, n)
        ]
    steps = {(step.query, step.found) for question in made for step in question.steps}
    assert len(made) > 40_000
    missed = set()
    for query, found in steps:
        [passages] = index.search([query], 3)
        shown = passages_text([passage_of(corpus[n]["contents"], score) for n, score in passages], 666)
        if not contains_words(shown, found):
            missed.add(query)
    assert missed == UNFOUND
    assert FACTBOOK.is_here
