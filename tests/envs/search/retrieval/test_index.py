import json

import numpy as np
import pytest

from turnwise.envs.search.retrieval.corpus import Corpus, corpus_file
from turnwise.envs.search.retrieval.dense import Dense
from turnwise.envs.search.retrieval.index import Bm25, best, words

TEXTS = {
    "Norway: Internet country code": ".no",
    "Norway: Capital": "name: Oslo",
    "Fiji: Capital": "name: Suva (on Viti Levu)",
    "Fiji: Background": "an island nation with a capital; " * 20,
    "Sea": "Ünïcode water",
}


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "passages.jsonl"
    lines = (
        json.dumps({"id": str(n), "contents": f'"{title}"\n{text}'}) for n, (title, text) in enumerate(TEXTS.items())
    )
    path.write_text("\n".join(lines))  # without a last line end
    return Corpus(path)


def titles(corpus, found):
    return [corpus[number]["contents"].partition("\n")[0].strip('"') for number, _ in found]


def test_passages_are_read_by_number(corpus):
    assert len(corpus) == 5
    assert corpus[4]["contents"] == '"Sea"\nÜnïcode water'
    assert next(corpus.texts()) == '"Norway: Internet country code"\n.no'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no passages"),
        ('{"contents": "x"}\n{', "line 2: not JSON"),
        ('{"contents": "x"}\n{"text": "x"}\n', "line 2: contents: needs to be a text"),
        ('{"contents": "x"}\n[1]\n', "line 2: contents: needs to be a text"),
    ],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, content, message):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        Bm25.of(Corpus(tmp_path / "x.jsonl"))


def test_a_corpus_is_of_the_catalogue_or_a_file(tmp_path):
    with pytest.raises(ValueError, match="run: turnwise data factbook"):
        corpus_file("factbook")
    with pytest.raises(ValueError, match="no corpus at factbok; set corpus"):
        corpus_file("factbok")


def test_words_in_common_and_those_of_titles_most(corpus):
    index = Bm25.of(corpus)
    one, two, three = index.search(["capital of Fiji", "code .no", "zzzz"], topk=2)
    assert titles(corpus, one) == ["Fiji: Capital", "Fiji: Background"]
    assert titles(corpus, two) == ["Norway: Internet country code"]
    assert three == []
    assert one[0][1] > one[1][1] > 0
    assert index.search([], 3) == []


def test_the_index_is_made_once_and_again_for_another_corpus(corpus, tmp_path, monkeypatch):
    Bm25.of(corpus)
    monkeypatch.setattr(Corpus, "texts", lambda self: pytest.fail("made again"))
    assert len(Bm25.of(corpus).search(["Suva"], 3)[0]) == 1
    corpus.path.write_text('{"contents": "other"}\n')
    with pytest.raises(pytest.fail.Exception):
        Bm25.of(Corpus(corpus.path))


def test_best_scores_come_first_and_ties_in_order():
    scores = np.array([0.0, 2.0, 3.0, 2.0, 2.0, -1.0], np.float32)
    assert best(scores, 3) == [(2, 3.0), (1, 2.0), (3, 2.0)]
    assert best(scores, 10) == [(2, 3.0), (1, 2.0), (3, 2.0), (4, 2.0)]
    assert best(np.zeros(3, np.float32), 2) == []


def test_every_word_counts():
    assert words("The .NO-domain, d'Ivoire 2014") == ["the", "no", "domain", "d", "ivoire", "2014"]


@pytest.fixture
def encoder(tmp_path):
    """The folder of a tiny sentence encoder with random weights."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", *sorted({w for t in TEXTS for w in words(t)})])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path / "e")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(tmp_path / "e")
    return tmp_path / "e"


def test_dense_vectors_find_the_most_similar_passage(corpus, encoder):
    index = Dense.of(corpus, encoder)
    texts = list(corpus.texts())
    for number, found in enumerate(index.search(texts, 2)):
        assert found[0][0] == number
        assert found[0][1] == pytest.approx(1.0, abs=1e-5)
        assert found[1][1] < found[0][1]
    assert index.search([], 2) == []
    alone = [index.search([text], 1)[0][0][1] for text in texts]
    assert alone == pytest.approx([1.0] * 5, abs=1e-5)  # padding beside others changed nothing


def test_a_dense_index_is_not_made_in_passing(corpus, encoder):
    with pytest.raises(ValueError, match="run: turnwise retrieve .* --retriever dense --only-index"):
        Dense.of(corpus, encoder, make=False)
    Dense.of(corpus, encoder)
    Dense.of(corpus, encoder, make=False)
    with pytest.raises(ValueError, match="run: turnwise data minilm"):
        Dense.of(corpus)
