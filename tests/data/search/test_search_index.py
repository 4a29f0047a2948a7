"""The index: ranking as SQLite's own, words of any script, damage, and other files."""

import re
import sqlite3
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies
from support.properties import SEEDS
from support.vectors import vectors_of

from bert_cli.data.search import database, late, lexical, words
from bert_cli.data.search.index import open_index
from bert_cli.data.search.late import Vectors
from bert_cli.data.search.passages import Document, Passage
from bert_cli.data.search.ranking import best_of, combined
from bert_cli.data.search.writing import write_index
from bert_cli.errors import ConfigError, DataError

TEXTS = [
    "Coffee is a drink that is made from the roasted beans of a plant.",
    "Tea is a drink of leaves in hot water.",
    "Soap is made from fat. It cleans hands, and the skin.",
    "The café in the street sells coffee, tea and cake.",
    "A river carries ice and stones down the mountain.",
    "The mountain is high, and its river is the source of the drink of the village.",
]
VECTORS = np.eye(6, 8, dtype=np.float32)


def make(path, texts=TEXTS, vectors=None):
    with write_index(path) as index, index.changing():
        for number, text in enumerate(texts, 1):
            file = index.add_file(f"/texts/{number}.txt", f"{number}.txt", "mark")
            index.add(file, Document(f"Title {number}", [text]), [Passage(0, len(text), text)])
        if vectors is not None:
            index.add_vectors(range(1, len(texts) + 1), vectors_of(vectors))
    return open_index(path)


@pytest.fixture
def index(tmp_path):
    return make(tmp_path / "index")


def own_ranking(texts, question):
    """Return the positions and scores by a table of SQLite alone, without words of half of the texts."""
    table = sqlite3.connect(":memory:")
    table.execute("CREATE VIRTUAL TABLE t USING fts5(x)")
    table.executemany("INSERT INTO t(rowid, x) VALUES (?, ?)", list(enumerate(texts)))
    terms = question.lower().strip("?").split()
    query = " OR ".join(f'"{word[:5]}"' + "*" * (len(word) > 4) for word in terms)
    rows = table.execute("SELECT rowid, -bm25(t) FROM t WHERE t MATCH ? ORDER BY rank", [query])
    return rows.fetchall()


@pytest.mark.parametrize(
    "question", ["roasted beans drink", "coffee or tea in the street?", "mountain river ice"]
)
def test_words_rank_as_sqlite_does(index, monkeypatch, question):
    monkeypatch.setattr(lexical, "RERANKED", 0)
    expected = own_ranking(TEXTS, question)
    hits = index.ask(question)
    assert hits[0].text == TEXTS[expected[0][0]]
    scores = dict(expected)
    for hit in hits:
        np.testing.assert_allclose(hit.score, scores[TEXTS.index(hit.text)], atol=1e-4)


def test_the_best_by_words_are_ranked_again_by_groups_of_four_letters(index, monkeypatch):
    question = "the mountains' rivers, a cafe and ice"
    again = index.lexical.scores(words.parse(question), np.True_)
    monkeypatch.setattr(lexical, "RERANKED", 0)
    before = index.lexical.scores(words.parse(question), np.True_)
    best = np.flatnonzero(before)
    assert best.tolist() == [3, 4, 5]

    def spaced(text):
        return " ".join(["", *re.findall("[a-z]+", text.lower().replace("é", "e")), ""])

    asked = spaced(question)
    groups = {asked[n : n + 4] for n in range(len(asked) - 3)}
    texts = [spaced(TEXTS[n]) for n in best]
    mean = sum(map(len, texts)) / len(texts)
    expected = np.zeros(len(texts))
    for group in groups:
        counts = np.array([text.count(group) for text in texts])
        rarity = np.log(1 + (len(texts) - (counts > 0).sum() + 0.5) / ((counts > 0).sum() + 0.5))
        limits = [1.2 * (0.25 + 0.75 * len(text) / mean) for text in texts]
        expected += rarity * 2.2 * counts / (counts + limits)
    spread = before[best].std() / expected.std()
    expected = before[best] + 2 * spread * (expected - expected.mean())
    expected += before[best].min() - expected.min()
    np.testing.assert_allclose(again[best], expected, rtol=1e-4)
    assert not again[before == 0].any()
    monkeypatch.setattr(lexical, "RERANKED", 2)
    two = np.argsort(-before)[:2]
    assert {*np.argsort(-index.lexical.scores(words.parse(question), np.True_))[:2]} == {
        *two
    }  # they stay above the others


@pytest.mark.parametrize(
    ("text", "question", "marked"),
    [
        ("Die Schiffe legten in den Häfen an.", "Wo legt ein Schiff an?", ["Schiffe", "an"]),
        ("Er sammelte Briefmarken.", "Briefmarkensammler", ["Briefmarken"]),
        ("На станции стояли паровозы.", "станция с паровозом", ["станции", "паровозы"]),
        ("Kütüphaneler akşam kapanır.", "kütüphanenin kapanışı", ["Kütüphaneler", "kapanır"]),
        ("كان المهندسون يبنون الجسور", "المهندس والجسر", ["المهندسون"]),
        ("It mounted the encrypted disks.", "mounting encryption", ["mounted", "encrypted"]),
        ("Los trenes llegaban tarde.", "llegada del tren", ["llegaban"]),
        ("Τα πλοία ταξίδευαν αργά.", "ταξιδεύει", ["ταξίδευαν"]),
        ("Model X12000 and X1200.", "x12000", ["X12000"]),
        ("The interests of an intern.", "interns", ["interests", "intern"]),
        ("The cats and the catalogue.", "cats", ["cats"]),
        ("Mount it internally by -i.", "how do I mount it?", ["Mount", "it"]),
        ("Vitamin C is an acid.", "C", ["C"]),
        ("Vitamin C is an acid.", 'acid "C"', ["C", "acid"]),
    ],
)
def test_other_forms_of_a_word_are_found(tmp_path, text, question, marked):
    hit = make(tmp_path / "index", [text, *TEXTS]).ask(question)[0]
    assert hit.text == text
    assert [hit.text[start:stop] for start, stop in hit.words] == marked


def test_of_equal_passages_the_first_ones_are_found(tmp_path):
    texts = [*TEXTS, TEXTS[0], *(f"{letter} has roasted beans." for letter in "WXYZ")]
    index = make(tmp_path / "index", texts)
    for top in (3, 9):
        titles = [hit.title for hit in index.ask("roasted beans", top)]
        assert titles == [f"Title {n}" for n in (8, 9, 10, 11, 1)][:top]
    assert best_of(np.float32([1, 2, 3, 2]), 2) == [2, 1]


@pytest.mark.parametrize(
    ("text", "question", "marked"),
    [
        ("我们明天去北京大学看书。", "北京", ["北京"]),
        ("東京は日本の首都です。", "日本の首都はどこ？", ["日本の首都"]),
        ("ภาษาไทยไม่มีช่องว่าง", "ภาษาไทย", ["ภาษาไทย"]),
        ("हिन्दी एक भाषा है", "हिन्दी", ["हिन्दी"]),
        ("서울은 한국의 수도이다", "서울은", ["서울은"]),
        ("Das schöne Straßencafé", "STRASSENCAFE schone", ["schöne", "Straßencafé"]),
        ("Ο φάρος της οδού είναι παλιός.", "ΠΑΛΙΟΣ οδου", ["οδού", "παλιός"]),
        ("Смотритель ещё спит, трамва\u0438\u0306", "еще трамвай", ["ещё", "трамва\u0438\u0306"]),
        ("كَتَبَ الوَلَدُ إلى أمّه", "كتب الولد", ["كَتَبَ", "الوَلَدُ"]),
        ("שָׁלוֹם לכולם", "שלום", ["שָׁלוֹם"]),
        ("The ﬁne oﬃce keeps the ﬂag", "office FINE", ["ﬁne", "oﬃce"]),
        ("The light\xadhouse logs", "lighthouse", ["light\xadhouse"]),
        ("ＵＳＢケーブル、型番はＸ１００", "usb x100 ケーブル", ["ＵＳＢケーブル", "Ｘ１００"]),
        ("ｶﾞﾗｽの窓", "ガラス", ["ｶﾞﾗｽ"]),
        ("カ\u3099ラスの窓", "ガラス", ["カ\u3099ラス"]),
        ("\u1112\u1161\u11ab국은 나라", "한국은", ["\u1112\u1161\u11ab국은"]),
        ("Zakład w Łodzi: Łódź", "zaklad LODZ", ["Zakład", "Łódź"]),
        ("Ørsted på øen, Ærø, œuvre", "orsted aero oeuvre", ["Ørsted", "Ærø", "œuvre"]),
        ("Iğdır ve DİYARBAKIR", "ığdir diyarbakır", ["Iğdır", "DİYARBAKIR"]),
        ("ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ დიდია", "საქართველო", ["ᲡᲐᲥᲐᲠᲗᲕᲔᲚᲝ"]),
        ("𞤀𞤁𞤂𞤢𞤥 𞤸𞤢", "𞤢𞤣𞤤𞤢𞤥", ["𞤀𞤁𞤂𞤢𞤥"]),
        ("می‌خواهم ۱۲ كتابي", "میخواهم 12 کتابی", ["می‌خواهم", "۱۲", "كتابي"]),
        ("على باب مستشفى", "علي مستشفي", ["على", "مستشفى"]),
        ("1\ufe0f\u20e3 Open the lid", "1 open", ["1\ufe0f\u20e3", "Open"]),
        ("Tôi nói tiếng Việt", "tieng viet", ["tiếng", "Việt"]),
        ("a \x02zebra\x03 runs", "runs zebra", ["zebra", "runs"]),
        ("Use 北京 with Python 3.11", "python 北京", ["北京", "Python"]),
        ("Use 北京Python 3.11", "python 北京", ["北京Python"]),
    ],
)
def test_words_of_every_script_are_found(tmp_path, text, question, marked):
    hit = make(tmp_path / "index", [text, *TEXTS]).ask(question)[0]
    assert hit.text == text
    assert [hit.text[start:stop] for start, stop in hit.words] == marked


def test_meaning_is_the_cosine_and_both_are_the_sum_of_standardised_scores(tmp_path):
    index = make(tmp_path / "index", vectors=VECTORS)
    question = np.array([[0.6, 0, 0, 0, 0.8, 0, 0, 0]], np.float32)
    index.embed = lambda texts: vectors_of(question)
    hits = index.ask("coffee", half="meaning", top=2)
    scores = [(hit.title, round(hit.score, 3)) for hit in hits]
    assert scores == [("Title 5", 0.8), ("Title 1", 0.6)]
    asked = words.parse("coffee")
    by_words, meaning = index.lexical.scores(asked, np.True_), index.by_meaning([asked])[0].cosines
    np.testing.assert_allclose(meaning, VECTORS @ question[0], atol=1e-3)

    def standard(scores):
        return (scores - scores.mean()) / scores.std()

    expected = 0.5 * standard(meaning) + 0.5 * standard(by_words)
    np.testing.assert_allclose(combined(by_words, meaning, 0.5), expected, rtol=1e-5)
    assert index.ask("coffee")[0].title == f"Title {1 + int(expected.argmax())}"
    for weight, first in ((0.9, "Title 5"), (0.0, f"Title {1 + int(by_words.argmax())}")):
        with write_index(index.path) as other, other.changing():
            other.record(weight=weight)
        assert index.weight == weight
        assert index.ask("coffee")[0].title == first


@pytest.mark.parametrize("size", [8, 80])
def test_tokens_rank_the_best_passages_again(size, tmp_path, monkeypatch):
    """Each token of the question looks for the most similar token of a passage; a token of 80 values keeps 64."""
    draw = np.random.default_rng(3)
    monkeypatch.setattr(late, "RERANKED", 4)
    vectors, asked = VECTORS @ draw.normal(size=(8, size)), draw.normal(size=(1, size))
    tokens = [draw.normal(size=(n, size)) for n in (1, 5, 2, 3, 7, 4, 3)]
    vectors, asked, *tokens = (
        np.float32(values / np.linalg.norm(values, axis=1, keepdims=True))
        for values in (vectors, asked, *tokens)
    )
    index = make(tmp_path / "index", vectors=vectors)
    index.embed = lambda texts: Vectors(asked, tokens[6:])
    alone = [index.ask("coffee", half=half, top=6) for half in ("words", "meaning")]
    before = {hit.text: hit.score for hit in index.ask("coffee", top=6)}
    every = np.concatenate(tokens)
    axes = late.axes_of(every)
    assert axes.shape == (size, min(size, 64))
    largest = np.linalg.svd(every, compute_uv=False)[:64]
    assert np.linalg.norm(every @ axes) == pytest.approx(np.linalg.norm(largest), rel=1e-5)
    with write_index(tmp_path / "index") as other, other.changing():
        other.record(axes=axes.tobytes())
        other.add_vectors(range(1, 7), Vectors(vectors, tokens[:6]))
    hits = index.ask("coffee", top=6)
    best = [TEXTS.index(text) for text in before][:4]
    short = [values @ axes for values in tokens]
    short = [values / np.linalg.norm(values, axis=1, keepdims=True) for values in short]
    similarity = np.array([(short[6] @ short[n].T).max(1).mean() for n in best])
    scores = np.array([before[TEXTS[n]] for n in best])
    after = scores + scores.std() * (similarity - similarity.mean()) / similarity.std()
    after += scores.min() - after.min()
    assert [TEXTS.index(hit.text) for hit in hits[:4]] == [best[n] for n in np.argsort(-after)]
    np.testing.assert_allclose([hit.score for hit in hits[:4]], -np.sort(-after), atol=0.02)
    assert [hit.text for hit in hits[4:]] == [*before][4:]
    assert [index.ask("coffee", half=half, top=6) for half in ("words", "meaning")] == alone


def change(path, kind, draw):
    """Change an index as another process does."""
    if kind == "another file":  # in place of this one, as `mv` does
        size = draw.integers(3, 7)
        make(path.with_name("other"), draw.permutation(TEXTS)[:size].tolist(), VECTORS[:size])
        path.with_name("other").replace(path)
        return
    with write_index(path) as other, other.changing():
        numbers = [number for (number,) in other.table.execute("SELECT id FROM passages")]
        if kind == "weight":
            other.record(weight=float(draw.choice([0.1, 0.5, 0.9])))
        elif kind == "a file more" or len(numbers) < 3:
            text = " ".join(draw.permutation(TEXTS[draw.integers(6)].split()))
            file = other.add_file(f"/more/{draw.integers(3)}", "more", "")
            other.add(file, Document("More", [text]), [Passage(0, len(text), text)])
        elif kind == "a file less":
            other.table.execute("DELETE FROM files WHERE id IN (SELECT max(id) FROM files)")
        elif kind == "vectors":
            vectors = draw.permutation(np.eye(len(numbers), 8, dtype=np.float32))
            other.add_vectors(numbers, vectors_of(vectors))
        else:
            other.table.execute("DELETE FROM vectors WHERE id = ?", [int(draw.integers(1, 4))])


KINDS = ("another file", "weight", "a file more", "a file less", "vectors", "a vector less")


def answers(index):
    """Return what an index answers by each half: hits, or the error."""
    asked = np.float32([0.6, 0, 0, 0, 0.8, 0, 0, 0])
    index.embed = lambda texts: vectors_of(np.tile(asked, (len(texts), 1)))
    found = []
    for half in (None, "words", "meaning"):
        for question in ("coffee", "the mountain river", "drink -tea"):
            try:
                found.append(
                    [
                        hit._replace(score=round(hit.score, 4))
                        for hit in index.ask(question, half=half)
                    ]
                )
            except (ConfigError, DataError) as error:
                found.append(str(error))
    return found


@settings(max_examples=6)
@given(strategies.permutations([*KINDS, *KINDS]), SEEDS)
def test_an_open_index_answers_as_one_opened_now_after_any_changes_of_another_process(
    tmp_path_factory, kinds, seed
):
    draw = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("open") / "index"
    index = make(path, vectors=VECTORS)
    seen = [answers(index)]
    for kind in kinds:
        change(path, kind, draw)
        seen.append(answers(index))
        assert seen[-1] == answers(open_index(path)), kind
    assert len({*map(str, seen)}) > 7


def test_an_open_index_does_not_mix_vectors_of_two_models(tmp_path):
    index = make(tmp_path / "index", vectors=VECTORS)
    index.embed = lambda texts: vectors_of(VECTORS[:1])
    assert index.ask("coffee", half="meaning")[0].title == "Title 1"
    before = [hit.score for hit in open_index(tmp_path / "index").ask("coffee")]
    with write_index(tmp_path / "index") as other:
        with other.changing():
            other.table.execute("DELETE FROM vectors")
            other.record(weights="another")
            other.add_vectors([1], vectors_of(VECTORS[:1]))
        with pytest.raises(
            ConfigError,
            match=r"since it was opened; open it again \(start `bert serve` again\), or ask by",
        ):
            index.ask("coffee")
        assert [hit.score for hit in index.ask("coffee", half="words")] == before
        with other.changing():
            other.add_vectors(range(2, 7), vectors_of(VECTORS[1:]))
    index = open_index(tmp_path / "index")
    index.embed, index.weights = (lambda texts: vectors_of(VECTORS[:1])), "another"
    assert index.ask("coffee", half="meaning")[0].title == "Title 1"


def test_a_snapshot_stays_as_it_is_and_holds_questions(index):
    with index.snapshot():
        before = index.count("passages")
        assert index.ask("coffee") and index.table.in_transaction
        assert index.count("passages") == before
    assert not index.table.in_transaction


def test_a_number_of_a_passage_is_not_used_again(tmp_path):
    index = make(tmp_path / "index", TEXTS[5:])
    gone = index.ask("village")[0].passage
    assert [hit.text for hit in index.document(gone)] == TEXTS[5:]
    make(tmp_path / "index", TEXTS[:1])
    assert index.document(gone) == []
    with pytest.raises(ConfigError, match="no longer has this passage; search again"):
        index.ask("coffee", passage=gone)


def test_a_sample_is_evenly_spaced_and_of_all_where_these_are_few(index):
    count = len(TEXTS)
    assert index.sample(count) == index.sample(count + 1) == TEXTS
    assert index.sample(count - 1) == TEXTS[::2]
    assert index.sample(1) == TEXTS[:1]


def test_a_document_is_read_around_a_passage(index):
    passages = [Passage(n, n + 1, f"word{n}") for n in range(1000)]
    with write_index(index.path) as other, other.changing():
        other.add(other.add_file("/long", "long", ""), Document("", []), passages)
    for number, found in ((500, range(300, 701)), (0, range(201)), (999, range(799, 1000))):
        hit = index.ask(f"word{number}")[0]
        assert [near.text for near in index.document(hit.passage)] == [f"word{n}" for n in found]


def test_an_answer_has_two_passages_of_a_document_and_equal_texts_once(index):
    texts = [f"Coffee from volcano {n}." for n in range(4)]
    with write_index(index.path) as other, other.changing():
        for name, extra in (
            ("long", texts),
            ("copied", [texts[0].replace(" ", "  "), "A volcano."]),
        ):
            passages = [Passage(n, n + 1, text) for n, text in enumerate(extra)]
            other.add(other.add_file(f"/{name}", name, ""), Document(name, []), passages)
    hits = index.ask("coffee volcano", 4)
    documents = [hit.document for hit in hits]
    assert documents.count("long") == 2 and len({*documents}) == 3
    assert [hit.of_document for hit in hits if hit.document == "long"] == [4, 4]
    hits = index.ask("coffee volcano", 100)
    assert sorted(hit.text for hit in hits if hit.document in ("long", "copied")) == sorted(
        [*texts, "A volcano."]
    )
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    # A document is a folder of its passages.
    alone = index.ask("coffee volcano", 3, folder="long")
    assert len(alone) == 3 and {hit.document for hit in alone} == {"long"}
    with write_index(index.path) as other, other.changing():
        for name in ("long/part", "old/long/part", "longer"):
            text = f"Coffee from the volcano {name}."
            passage = Passage(0, len(text), text)
            other.add(other.add_file(f"/{name}", name, ""), Document(name, []), [passage])
    inside = {hit.document for hit in index.ask("coffee volcano", 9, folder="long")}
    assert inside == {"long", "long/part"}
    within = index.ask("coffee volcano", 9, passage=alone[0].passage)
    assert [hit.document for hit in within] == ["long"] * 4
    with pytest.raises(ConfigError, match="no document is in it"):
        index.ask("coffee", folder="lon")


def test_of_equal_texts_the_best_is_shown_and_in_a_folder_the_one_that_is_in_it(index):
    text = "A drink from beans that grow on a volcano."
    with write_index(index.path) as other, other.changing():
        for title in ("Volcanoes", "Coffee", "Cocoa"):
            file = other.add_file(f"/{title}", title, "")
            document = Document(title, [text], is_named=True)
            other.add(file, document, [Passage(0, len(text), text)])
    for folder, title in (("", "Coffee"), ("Volcanoes", "Volcanoes"), ("Cocoa", "Cocoa")):
        hits = index.ask("coffee beans", 9, folder=folder)
        assert [hit.title for hit in hits if hit.text == text] == [title]


def test_while_a_large_file_is_read_readers_are_not_locked_out_and_other_writers_are(tmp_path):
    make(tmp_path / "index")
    with write_index(tmp_path / "index") as index, index.changing():
        with pytest.raises(DataError, match="another `bert search make` writes it"):
            write_index(tmp_path / "index").__enter__()
        passages = [Passage(0, 1, f"word{n} " * 100) for n in range(20_000)]
        index.add(index.add_file("/large", "large", ""), Document("", []), passages)
        reader = sqlite3.connect(tmp_path / "index", 0)
        assert reader.execute("SELECT count(*) FROM passages").fetchone() == (len(TEXTS),)
        reader.close()


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("?!", "has no word"),
        ("", "has no word"),
        ("-coffee", "has no word; ask with a word; -word only excludes"),
        ('""', "has no word"),
        ('a "roasted bean', "has a quotation mark without its other; end the phrase with it, or"),
        ("\0", "has no word"),
        ("word " * 2_000_000, "has 10,000,000 characters, more than 10,000"),
    ],
    ids=["marks", "empty", "excluded", "no phrase", "phrase", "zero", "10 MB"],
)
def test_a_question_that_cannot_be_asked_is_an_error(index, question, message):
    with pytest.raises(ConfigError, match=message):
        index.ask(question)
    with pytest.raises(ConfigError, match=r"top .0.: is less than 1; set 1 or more"):
        index.ask("coffee", top=0)


def test_a_question_of_the_query_language_is_words(index):
    asked = ["' OR NEAR(", "text:coffee*", "-coffee ^tea", 'AND "(" -"*"', "x" * 9_999]
    for question in (*asked, " ".join(f"word{n}" for n in range(1100))):
        index.ask(question)
    assert index.ask("coffee NOT tea")[0].text == TEXTS[3]
    assert index.ask("-coffee ^tea")[0].text == TEXTS[1]


def test_another_folding_of_words_has_another_format():
    folded = words.exactly("Straße Ørsted ﬁ İ ی ى ک 1\ufe0f\u20e3 ガ ก้ é")
    assert (database.VERSION, folded) == (7, "strasse orsted fi i ي ي ك 1 ガ ก ้ e")


def test_every_letter_finds_itself_in_each_case_and_form():
    for code in range(0x20000):
        letter = chr(code)
        if unicodedata.category(letter)[0] in "LN" and (folded := words.folded(letter)).strip():
            assert words.folded(folded) == folded, letter
            forms = [unicodedata.normalize(form, letter) for form in ("NFC", "NFD", "NFKC")]
            cases = [] if "GEGRAMMENI" in unicodedata.name(letter, "") else [letter.upper()]
            others = {letter.lower(), *forms, *cases}
            assert {words.folded(form) for form in others} == {folded}, letter


def test_words_are_cut_where_letters_end():
    assert " ".join(words.words_of("What's a foo_bar, C++ 3.11?")) == "what s a foo bar c 3 11"
    assert words.words_of("北京大学 café") == ["北京", "京大", "大学", "cafe"]


def test_threads_ask_one_index(index):
    with ThreadPoolExecutor(8) as pool:
        hits = pool.map(index.ask, ["roasted beans"] * 64)
    assert {found[0].text for found in hits} == {TEXTS[0]}


def test_a_flipped_bit_or_a_misplaced_page_is_an_error_or_changes_no_answer(tmp_path):
    path = tmp_path / "index"
    make(path, TEXTS * 4, np.eye(24, 30, dtype=np.float32)[:, :8] + 0.1)
    data = path.read_bytes()

    def answers():
        index = open_index(path)
        index.embed = lambda texts: vectors_of(np.eye(1, 8, dtype=np.float32))
        return [index.ask("coffee drink", half=half) for half in ("words", "meaning", None)]

    expected = answers()
    versions: list[bytearray] = []
    for place in np.random.default_rng(0).integers(0, 8 * len(data), 400).tolist():
        versions.append(bytearray(data))
        versions[-1][place // 8] ^= 1 << place % 8
    pages = [data[n : n + 4096] for n in range(0, len(data), 4096)]
    for pair in combinations(range(len(pages)), 2):
        order = [sum(pair) - n if n in pair else n for n in range(len(pages))]
        versions.append(bytearray().join(pages[n] for n in order))
    detected = 0
    for number, version in enumerate(versions):
        path.write_bytes(version)
        try:
            assert answers() == expected, number
        except DataError:
            detected += 1
    assert detected > len(versions) - 100


def test_an_index_that_was_not_finished_is_checked_when_it_continues(tmp_path):
    path = tmp_path / "index"
    expected = make(path).ask('coffee "the roasted beans"')

    def damage(change):
        with closing(sqlite3.connect(path)) as table, table:
            table.execute("UPDATE seal SET crc = ''")
            table.execute(change)

    damage("UPDATE postings SET offsets = x'0000', times = x'01', positions = x'00'")
    assert open_index(path).ask('coffee "the roasted beans"') != expected
    with write_index(path):  # makes the postings again
        pass
    assert open_index(path).ask('coffee "the roasted beans"') == expected
    damage("UPDATE passages SET text = 'x'")
    with (
        pytest.raises(DataError, match=r"is damaged \(ok\); move it away and make it again"),
        write_index(path),
    ):
        pass
    damage("DROP TABLE files")
    with pytest.raises(DataError, match=r"written \(no such table: files\); check the disk"):
        open_index(path).count("files")
