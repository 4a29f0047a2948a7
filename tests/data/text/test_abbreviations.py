import json
from pathlib import Path

import pytest

from bert_cli.config.data import PreprocessSettings
from bert_cli.data.io.manifest import read_manifest
from bert_cli.data.text import preprocess
from bert_cli.data.text.preprocess import LISTS, keep_abbreviations
from bert_cli.errors import DataError

# Of at least 50 sentences a language, `|` between them: those that come out whole, beside those of sentencex alone.
REACHED = {
    "ar": (50, 31), "el": (48, 24), "en": (47, 30), "fr": (49, 25), "hi": (50, 27), "hu": (46, 27),
    "nl": (48, 34), "pl": (46, 14), "ro": (48, 20), "ru": (45, 29), "tr": (49, 23), "vi": (47, 28),
}  # fmt: skip


TEXTS = Path(__file__).with_name("abbreviations.txt").read_text().removeprefix("= ").split("\n= ")
JUDGE = {text[:2]: [line.split(" | ") for line in text.splitlines()[1:]] for text in TEXTS}


def count_whole(split, language):
    pieces = [{piece.strip() for piece in split(" ".join(text))} for text in JUDGE[language]]
    texts = zip(JUDGE[language], pieces, strict=True)
    return sum(sentence in whole for sentences, whole in texts for sentence in sentences)


def run(folder, out, language):
    settings = {"input": folder / "in.txt", "out": folder / out, "processes": 1}
    preprocess.run(PreprocessSettings(language=language, **settings))
    lines = (folder / out / "text_00000.txt").read_text().splitlines()
    return read_manifest(folder / out)["settings"], lines


@pytest.mark.parametrize("language", REACHED)
def test_an_abbreviation_of_the_language_ends_no_sentence(language):
    assert sum(map(len, JUDGE[language])) >= 50
    split = preprocess.load_splitter("sentencex", language)
    with_lists, alone = REACHED[language]
    assert count_whole(split, language) == alone
    assert count_whole(keep_abbreviations(split, language), language) == with_lists


# Punkt does not split after danda.
@pytest.mark.parametrize("language", sorted(set(REACHED) - {"hi", "en"}))
def test_the_same_rule_joins_what_punkt_cut(language):
    from nltk.tokenize.punkt import PunktSentenceTokenizer

    split = keep_abbreviations(PunktSentenceTokenizer().tokenize, language)
    assert count_whole(split, language) >= 45


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
    settings, lines = run(tmp_path, "out", language)
    assert lines == sentences.split("|")
    assert settings["abbreviations"] == LISTS["version"]


def test_a_begun_folder_goes_on_with_the_rule_that_began_it(tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("M. Dupont vint. Fin.\n")
    with monkeypatch.context() as earlier:
        earlier.setitem(LISTS, "languages", {})
        begun = run(tmp_path, "out", "fr")
    assert begun[1] == ["M.", "Dupont vint.", "Fin."] and "abbreviations" not in begun[0]
    for name in ("text_00000.txt", "manifest.json"):
        (tmp_path / "out" / name).unlink()
    assert run(tmp_path, "out", "french") == begun
    run(tmp_path, "new", "fr")
    monkeypatch.setitem(LISTS, "version", "2")
    with pytest.raises(DataError, match="abbreviations was '1', now '2'"):
        run(tmp_path, "new", "fr")


def test_other_text_and_languages_are_split_as_before():
    split = preprocess.load_splitter("sentencex", "fr")
    text = "Il aime l'art. Le soir tombe… Est-ce vrai ? Oui.  Deux espaces.\tUn onglet. 5 jours."
    assert keep_abbreviations(split, "fr")(text) == split(text)
    assert keep_abbreviations(split, "de") is split


def test_the_file_of_the_lists_names_its_sources_and_their_license():
    head = json.dumps({**LISTS, "languages": {}})
    for words in ("spaCy", "sacremoses", "MIT License", "Permission is hereby granted"):
        assert words in head
