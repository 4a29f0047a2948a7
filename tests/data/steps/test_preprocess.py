"""Sentences: the exact text, whatever the tool that wrote the documents did to it."""

from pathlib import Path

import pytest

from bert_cli.cli import main
from bert_cli.config.data import PreprocessSettings
from bert_cli.data.io.files import Reading, recognise
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.steps.preprocess import run as preprocess_text
from bert_cli.data.text import preprocess
from bert_cli.data.text.preprocess import keep_abbreviations
from bert_cli.errors import DataError


def doc(title, *lines, number=1):
    head = f'<doc id="{number}" url="https://en.wikipedia.org/wiki?curid={number}" title="{title}">'
    return "\n".join([head, title, "", *lines, "", "</doc>", ""])


def corpus(folder, **files):
    (folder / "AA").mkdir(parents=True)
    for name, text in files.items():
        (folder / "AA" / name).write_bytes(text.encode())
    return folder


def written(out):
    return (out / "text_00000.txt").read_text()


@pytest.fixture
def bare(monkeypatch, tmp_path):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    preprocess.load_splitter.cache_clear()
    return tmp_path


def run(source, out, processes=1, **settings):
    preprocess_text(PreprocessSettings(input=source, out=out, processes=processes, **settings))
    return read_manifest(out)


def test_an_output_folder_in_its_input_is_refused(tmp_path):
    source = corpus(tmp_path / "in", a="One.\n")
    for given in (source, source / "**" / "a"):
        for out in (source, source / "AA" / "out", tmp_path / "in" / ".." / "in" / "out"):
            with pytest.raises(
                DataError, match=r"output \(.*\): is .*/in or inside it, where the next run"
            ):
                run(given, out)
    assert sorted(path.name for path in source.rglob("*")) == ["AA", "a"]
    for given, out in ((source, source / ".out"), (source / "AA" / "a", source / "AA" / "out")):
        assert run(given, out, sentence_splitter="lines")["counts"]["sentences"] == 1
    run(source / ".out", source / ".out" / "again")  # the manifest of a step lists its files


def test_the_sentences_without_a_letter_are_counted(tmp_path, capsys):
    (tmp_path / "chat").write_text("Yes 👍\n👍\n:-)\n\n?!\n1\n")
    counts = run(tmp_path / "chat", tmp_path / "out", sentence_splitter="lines")["counts"]
    assert (counts["sentences"], counts["sentences_without_words"]) == (2, 3)
    assert "preprocess: dropped 3 sentences without a letter or a digit" in capsys.readouterr().out


EMPTY = doc("Empty") + doc("Dots", "...", "()") + '<doc id="9" url="" title="X">\n</doc>\n'
TEXTS = {
    "one sentence per line, a blank line between documents": (
        doc("Moon", "It is far. It is bright.", "It is old.") + doc("Sun", "It is hot."),
        "It is far.\nIt is bright.\nIt is old.\n\nIt is hot.\n",
    ),
    "documents without text are dropped": (
        EMPTY + doc("A", "One.") + EMPTY + doc("B", "Two.") + EMPTY,
        "One.\n\nTwo.\n",
    ),
    "text outside documents is dropped": (
        "tail\n\n</doc>\n" + doc("A", "One.") + "Stray.\n  \n" + doc("B", "Two.") + "last\n",
        "One.\n\nTwo.\n",
    ),
    "escapes are undone once and make no document": (
        doc("A &amp; B", "AT&amp;T &lt;b&gt; &amp;lt;", '&lt;doc id="7" url="u" title="t"&gt;')
        + doc("C", "&lt;/doc&gt;", "<doc about dogs>"),
        'AT&T <b> &lt;\n<doc id="7" url="u" title="t">\n\n</doc>\n<doc about dogs>\n',
    ),
    "titles are dropped, also with quotes, and only once": (
        doc('The "A" > B', 'The "A" > B', "It is.")
        + '<doc id="5" revid="77" url="u" title="T">\nT\n\nBody here.\n</doc>\n',
        'The "A" > B\nIt is.\n\nBody here.\n',
    ),
    "placeholders and empty brackets are removed": (
        doc(
            "A",
            "Albedo () or whiteness (; ) is the share formula_1, where formula_12 is light.",
            "formula_3",
            "Let formula_4 be (formula_5) codice_2.",
            "A formula_one car and my_formula_1 (x) stay ; as [1] they ( are ) .",
        ),
        "Albedo or whiteness is the share, where is light.\nLet be.\n"
        "A formula_one car and my_formula_1 (x) stay ; as [1] they ( are ) .\n",
    ),
    "white space and line ends of every kind": (
        doc("Été", "Un  été\u00a0chaud.\u2028Très chaud.\x85 Oui.", "日本語。").replace(
            "\n", "\r\n"
        ),
        "Un été chaud. Très chaud. Oui.\n日本語。\n",
    ),
    "a file that ends in a document": (doc("A", "One. Two.")[:-7], "One.\nTwo.\n"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_sentences_of_articles_are_exactly_these(tmp_path, case, monkeypatch):
    text, expected = TEXTS[case]
    source, output = tmp_path / "in", tmp_path / "out"
    source.write_bytes(text.encode())
    plain = lambda line: line.replace(". ", ".\0").split("\0")  # noqa: E731
    monkeypatch.setattr(preprocess, "load_splitter", lambda *_: plain)
    parts = [recognise(source, Reading("wikiextractor"))]
    settings = {"reading": Reading(), "splitter": "lines", "language": ""}
    stats = preprocess.split_shard((), output, parts=parts, **settings)
    assert output.read_bytes().decode() == expected
    assert stats.documents == expected.count("\n\n") + 1
    assert stats.sentences == len(expected.split("\n")) - stats.documents
    outside, empty = ("outside" in case) * 3, ("without text" in case) * 9
    counts = {"documents_without_text": empty, "lines_outside_documents": outside}
    assert stats.extra == counts | {"sentences_without_words": ("without text" in case) * 3}
    note = f"{source}: left out text outside <doc ...> ... </doc>, lines: 3"
    assert stats.notes == ((note,) if outside else ())


def test_english_abbreviations_and_quotes(shared_data, tmp_path, monkeypatch):
    monkeypatch.setattr("nltk.data.path", [str(shared_data / "nltk_data")])
    monkeypatch.setenv("NLTK_DATA", str(shared_data / "nltk_data"))
    preprocess.load_splitter.cache_clear()
    lines = [
        "Dr. Smith of the U.S. Navy met J. R. Green at 5 p.m. on Sunday. They spoke.",
        'He said "Stop it." Then he left. "Why?" she asked. It cost $3.50 (about £2).',
        "History.",
    ]
    source = corpus(tmp_path / "in", wiki_00=doc("A", *lines))
    manifest = run(source, tmp_path / "out", sentence_splitter="punkt")
    assert (tmp_path / "out/AA/wiki_00.txt").read_text() == (
        "Dr. Smith of the U.S. Navy met J. R. Green at 5 p.m. on Sunday.\nThey spoke.\n"
        'He said "Stop it."\nThen he left.\n"Why?"\nshe asked.\nIt cost $3.50 (about £2).\n'
        "History.\n"
    )
    assert manifest["settings"]["splitter"] == "punkt" and manifest["notes"] == []
    assert manifest["versions"]["nltk"] == "3.10.4"
    # NLTK's data have the name of the language, which the code stands for.
    run(source, tmp_path / "code", sentence_splitter="punkt", language="en")
    texts = [(tmp_path / out / "AA/wiki_00.txt").read_text() for out in ("out", "code")]
    assert texts[0] == texts[1]
    # Data that vanish between two runs are an error.
    monkeypatch.setattr("nltk.data.path", [])
    preprocess.load_splitter.cache_clear()
    with pytest.raises(DataError, match="Punkt's data are not installed"):
        run(source, tmp_path / "out", sentence_splitter="punkt")


def test_without_data_punkt_is_refused_with_what_to_do(bare):
    source = corpus(bare / "in", wiki_00=doc("A", "One. Two."))
    remedy = (
        "run python -m nltk.downloader punkt_tab where .*, or pass --sentence-splitter sentencex"
    )
    for language, message in (
        ("en", rf"sentence_splitter \(punkt\): Punkt's data are not installed; {remedy}"),
        (
            "bulgarian",
            r"language \(bulgarian\): NLTK has no Punkt data for it; pass --sentence-spli",
        ),
    ):
        with pytest.raises(DataError, match=message):
            run(source, bare / "out", sentence_splitter="punkt", language=language)
    assert not (bare / "out").exists()


def test_a_file_whose_name_is_not_utf8_is_refused_before_the_work(tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b\udcff.txt"):
        (tmp_path / "in" / name).write_text("One. Two.\n")
    for source in (tmp_path / "in", tmp_path / "in/*.txt"):
        with pytest.raises(DataError, match=r"b\\udcff.txt': has a name that is not UTF-8; rename"):
            run(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_splitter_is_sentencex_also_where_the_data_of_punkt_are_installed(
    bare, capsys, monkeypatch
):
    (bare / "in.txt").write_text("Herr Dr. Maier kam. Er ging.\n\nDas war es.\n")
    manifest = run(bare / "in.txt", bare / "out", language="german")
    recorded = manifest["settings"]
    assert (recorded["language"], recorded["splitter"]) == ("de", "sentencex")
    line = "preprocess: sentencex splits the sentences, language german\n"
    assert line in capsys.readouterr().out
    assert written(bare / "out").startswith("Herr Dr. Maier kam.\nEr ging.\n")
    # A folder can be continued under another name of its language.
    assert run(bare / "in.txt", bare / "out", language="de")["settings"] == recorded
    monkeypatch.setattr(preprocess, "load_splitter", lambda *_: None)
    with pytest.raises(DataError, match="splitter was 'sentencex', now 'punkt'"):
        run(bare / "in.txt", bare / "out", language="de", sentence_splitter="punkt")


SENTENCES = {
    "ja": "日本は島国である。|人口は約1.2億人（2020年）である！|1868年から首都は東京だ。|「行こう」と彼は言った。",
    "zh": "北京是中国的首都。|1949年成立。|它有很长的历史！|你知道吗？|他说：“我来了。”|然后走了。",
    "ko": "서울은 한국의 수도이다. |인구는 천만 명이다. |한강이 흐른다.",
    "ar": "القاهرة عاصمة مصر. |هل هي كبيرة؟ |نعم، وهي قديمة.",
    "fa": "تهران پایتخت است. |شهر بزرگی است؟ |بله.",
    "hi": "दिल्ली भारत की राजधानी है। |यह पुराना शहर है। |क्या आप जानते हैं?",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย |มีประชากรมากกว่า 10 ล้านคน |มีตลาดต่าง ๆ มากมาย",
    "lo": "ວຽງຈັນແມ່ນນະຄອນຫຼວງ |ຕັ້ງຢູ່ແຄມແມ່ນ້ຳຂອງ",
    "km": "ភ្នំពេញជារាជធានី។ |វាជាទីក្រុងធំ៕ |ធំ។",
    "bo": "ལྷ་ས་ནི་བོད་ཀྱི་རྒྱལ་ས་ཡིན། |དེ་ནི་གྲོང་ཁྱེར་ཆེན་པོ་ཞིག་རེད།",
    "my": "ရန်ကုန်သည် မြို့ကြီးဖြစ်သည်။ |လူဦးရေ များသည်။",
    "vi": "Hà Nội là thủ đô. |Thành phố có 8,5 triệu dân. |Đó là thành phố lớn.",
}


def test_a_language_with_a_region_has_the_breaks_of_the_language():
    for language in ("ja", "JA", "ja-JP", "ja_JP"):
        split = preprocess.load_splitter("sentencex", language)
        assert split("首都は東京だ。1868年から。") == ["首都は東京だ。", "1868年から。"]


@pytest.mark.parametrize("language", SENTENCES)
def test_sentences_of_many_scripts_end_at_their_own_marks(tmp_path, language, capsys):
    sentences = SENTENCES[language].split("|")
    (tmp_path / "in.txt").write_text("".join(sentences) + "\n")
    run(tmp_path / "in.txt", tmp_path / "out", sentence_splitter="sentencex", language=language)
    assert written(tmp_path / "out").splitlines() == [line.strip() for line in sentences]
    has_rules = language in {"ja", "zh", "ar", "hi", "th", "lo", "km", "bo", "my"}
    assert ("sentencex has no rules for" in capsys.readouterr().out) != has_rules


def test_a_tilde_that_the_shell_left_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file.txt").write_text(doc("A", "Text."))
    for name, out in (("file.txt", "one"), ("*.txt", "two")):
        assert main(["preprocess", f"~/{name}", f"~/{out}", "--sentence-splitter", "lines"]) == 0
        assert (tmp_path / out / "file.txt.txt").read_text() == "Text.\n"


def test_the_parquet_of_the_ready_made_wikipedias_is_read_as_it_is(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["Albedo is a measure. It has no unit.\n\nHistory\n\nLambert named it in 1760.", "One."]
    rows = {"id": ["39", "40"], "url": ["https://x.example/Albedo", ""], "title": ["Albedo", "One"]}
    more = {"wikiname": ["enwiki"] * 2, "page_id": [39, 40], "wikitext": ["'''Albedo'''"] * 2}
    more |= {"infoboxes": ["[]"] * 2, "has_math": [False] * 2}
    for name, columns in (("train-00000-of-00001", {}), ("000_00000", more)):
        (tmp_path / name).mkdir()
        table = pyarrow.table({"text": texts, **rows, **columns})
        parquet.write_table(table, tmp_path / name / f"{name}.parquet")
        counts = run(tmp_path / name, tmp_path / f"{name}.out", sentence_splitter="lines")["counts"]
        assert (counts["documents"], counts["sentences"]) == (2, 4)
        text = texts[0].replace("\n\n", "\n")
        assert written(tmp_path / f"{name}.out") == f"{text}\n\nOne.\n"


# Of at least 50 sentences a language, `|` between them: those that come out whole, beside those of sentencex alone.
REACHED = {
    "ar": (50, 31), "el": (48, 24), "en": (47, 30), "fr": (49, 25), "hi": (50, 27), "hu": (46, 27),
    "nl": (48, 34), "pl": (46, 14), "ro": (48, 20), "ru": (45, 29), "tr": (49, 23), "vi": (47, 28),
}  # fmt: skip


JUDGED = Path(__file__).with_name("abbreviations.txt").read_text().removeprefix("= ").split("\n= ")
JUDGE = {text[:2]: [line.split(" | ") for line in text.splitlines()[1:]] for text in JUDGED}


def count_whole(split, language):
    pieces = [{piece.strip() for piece in split(" ".join(text))} for text in JUDGE[language]]
    texts = zip(JUDGE[language], pieces, strict=True)
    return sum(sentence in whole for sentences, whole in texts for sentence in sentences)


@pytest.mark.parametrize("language", REACHED)
def test_an_abbreviation_of_the_language_ends_no_sentence(language):
    assert sum(map(len, JUDGE[language])) >= 50
    split = preprocess.load_splitter("sentencex", language)
    with_lists, alone = REACHED[language]
    assert count_whole(split, language) == alone
    assert count_whole(keep_abbreviations(split, language), language) == with_lists


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        ("fr", "M. Dupont et Mme. Durand sont venus.|Fin."),
        ("fr", "L'art. 1er de la loi no. 78-17 du 6 janv. 1978 s'applique.|Fin."),
        ("en", "Pub. L. 94 was signed.|See Eq. (3).|Add approx. 5 mL.|Temp. 98.6 was high."),
        ("en", "He moved to the U.S.|The next day it rained.|He drank at the bar.|5 men left."),
        ("hu", "Az ára 500 Ft.|Ezt Ft. Molnár mondta."),
        ("hi", "वह 5 कि.मी. चला।|डॉ. राम आए।"),
        ("turkish", "Sn. Başkan konuştu.|Herkes sustu."),
    ],
)
def test_the_command_keeps_abbreviations(tmp_path, language, sentences):
    (tmp_path / "in.txt").write_text(sentences.replace("|", " ") + "\n")
    run(tmp_path / "in.txt", tmp_path / "out", language=language)
    assert written(tmp_path / "out").splitlines() == sentences.split("|")


def test_other_text_and_languages_are_split_as_before():
    split = preprocess.load_splitter("sentencex", "fr")
    text = "Il aime l'art. Le soir tombe… Est-ce vrai ? Oui.  Deux espaces.\tUn onglet. 5 jours."
    assert keep_abbreviations(split, "fr")(text) == split(text)
    assert keep_abbreviations(split, "de") is split
