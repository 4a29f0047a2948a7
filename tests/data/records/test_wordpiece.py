"""The encoder, judged by the tokenizer of the library on hard text."""

import random

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from bert_cli.data.records import wordpiece
from bert_cli.data.records.tokenizer import SPECIAL_TOKENS, Encoder

HARD = [
    "",
    "   ",
    "Plain words, with punctuation: it's 3.5% (of $10) -- e.g. well-known; isn't?",
    "ALL CAPS and CamelCase 123abc abc123 a1b2c3 http://example.org/a_b?c=d&e=f#g ~tilde~ `x` ^|{}",
    "Crème brûlée, façade, naïve, Zürich, Ångström, señor, Łódź, İstanbul ıI, ǅ ß ẞ ﬁ ﬂ",
    "e\u0301 and \u0301e combining, a\u0327\u0301 two of them, \u0301 alone, x\u20ddy enclosed",
    "Сливен е град в България. Ёлка, Йод — «кавычки»",
    "Việt Nam là một quốc gia; Đường, ở, ữ, ễ",
    "中华人民共和国成立于1949年。東京タワーは、ひらがなとカタカナ。 abc中def 㐀 豈 \U00020000 \U0002b740",
    "대한민국의 수도는 서울이다. \u1112\u1161\u11ab",
    "ภาษาไทยเป็นภาษาที่ ไม่มีช่องว่าง กำ",
    "हिन्दी में लिखा हुआ पाठ, क्षत्रिय।",
    "العربية تُكتب من اليمين، مُحَمَّد ـــ؟",
    "עִבְרִית עם ניקוד ־ ׳",
    "Ελληνικά: Ὀδυσσεύς ΟΔΟΣ; τέλος\u037e ᾳ",
    "emoji 😀 👩‍👩‍👧‍👦 🇧🇬 ❤️ ☃ 1️⃣ 🏴\U000e0067\U000e0062",
    "zero\u200bwidth\u200c and\u200djoin \ufeffbom soft\u00adhyphen \u2060 word\u2060joiner \u180e",
    "no-break\u00a0space narrow\u202fspace em\u2003space ideographic\u3000space thin\u2009 ogham\u1680x",
    "line\u2028separator paragraph\u2029separator next\x85line",
    "a\x0bb c\x0cd e\x1cf g\x1dh i\x1ej k\x1fl \x0b \x1f m\x85n",
    "\x00nul\x00 bell\x07 esc\x1b[31m del\x7f \x01 x\x02y tab\tseparated \r return\r",
    "replacement \ufffd a\ufffdb private \ue000 x\ue000y unassigned \u0378 \U000e0001tag noncharacter \ufffe",
    "… – — ‘single’ “double” „low“ ‹ › • · × ÷ ± § ¶ © ® ™ ° № ′ ″ ⁄ ¿ ¡ € £ ¥ ₹ ½ ² ₂ Ⅷ ①",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101 + " " + "Z" * 200 + "-" + "q" * 5000,
    "é" * 99 + " " + "é" * 100 + " " + "e\u0301" * 101 + " " + "日" * 150 + " " + "ж" * 101,
    "unaffable unseenpartzzz " + "ab" * 50 + "c " + "1234567890" * 10 + "1",
    "##ing ##s # ## a##b [UNKNOWN] [unused1] <s> </s>",
]
LITERAL = "the [SEP] and [CLS], [MASK] [PAD] [UNK] x[SEP]y [sep] [ SEP ]"


@pytest.fixture(scope="module")
def vocabularies():
    """Uncased and cased, trained on the hard lines, so that all their scripts have pieces."""
    made = {}
    for cased in (False, True):
        trainer = BertWordPieceTokenizer(lowercase=not cased)
        trainer.train_from_iterator(HARD[:-1] * 3, vocab_size=900, show_progress=False)
        ids = trainer.get_vocab()
        made[cased] = {piece: ids[piece] for piece in sorted(ids, key=ids.__getitem__)}
    return made


def reference(vocabulary, cased):
    return BertWordPieceTokenizer(vocabulary, lowercase=not cased)


def check(vocabulary, cased, lines, encoder=None):
    """Every line's tokens, and which lines are blank, against the library."""
    encoder = encoder or Encoder(vocabulary, cased=cased)
    library = reference(vocabulary, cased)
    lines = [line.replace("\n", " ") for line in lines]
    got = encoder.encode("\n".join(lines))
    expected = [library.encode(line, add_special_tokens=False).ids for line in lines]
    ends = np.cumsum(got.lengths)
    for line, end, length, ids in zip(lines, ends, got.lengths, expected, strict=True):
        assert got.tokens[end - length : end].tolist() == ids, repr(line)
    assert ends[-1] == len(got.tokens)
    spaces = wordpiece._CONTROL_SPACES
    expected_blank = [not line.strip(spaces + " \t\r").strip() for line in lines]
    assert got.blank.tolist() == expected_blank
    return encoder


@pytest.mark.parametrize("cased", [False, True])
def test_hard_lines_and_random_characters_are_encoded_as_the_library_does(vocabularies, cased):
    check(vocabularies[cased], cased, HARD)
    draw = random.Random(7)
    pool = "".join(HARD)
    kinds = [
        lambda: draw.choice(pool),
        lambda: chr(draw.randrange(0x20, 0x7F)),
        lambda: chr(draw.choice([*range(0x20), 0x7F, *range(0x80, 0xA1)])).replace("\n", ""),
        lambda: chr(draw.randrange(0xA0, 0xD800)),
        lambda: chr(draw.choice([*range(0xE000, 0x10000), *range(0x1F000, 0x20000)])),
        lambda: draw.choice(" \u00a0\u2003\u3000\u200b\u200d\ufeff\u0301\u0323"),
        lambda: " ",
    ]
    lines = ["".join(draw.choice(kinds)() for _ in range(draw.randrange(60))) for _ in range(2000)]
    check(vocabularies[cased], cased, lines)


@pytest.mark.parametrize("cased", [False, True])
def test_every_character_alone_and_between_letters(vocabularies, cased):
    points = [point for point in range(0x30000) if not 0xD800 <= point < 0xE000 and point != 10]
    step = 7  # all of them take six seconds
    lines = [f"{chr(p)} a{chr(p)}b {chr(p)}{chr(p)}" for p in points[:0x800] + points[0x800::step]]
    check(vocabularies[cased], cased, lines)


def test_text_cannot_make_special_ids(vocabularies):
    for cased, vocabulary in vocabularies.items():
        tokens = Encoder(vocabulary, cased=cased).encode(LITERAL).tokens.tolist()
        forbidden = {vocabulary[token] for token in SPECIAL_TOKENS} - {vocabulary["[UNK]"]}
        assert not forbidden & set(tokens)
        assert vocabulary["["] in tokens
        # The library's tokenizer with added tokens does make them.
        assert forbidden & set(reference(vocabulary, cased).encode(LITERAL).ids[1:-1])


def test_cached_words_and_words_after_clearing_the_cache_are_encoded_equally(
    vocabularies, monkeypatch
):
    encoder = check(vocabularies[False], False, HARD)
    check(vocabularies[False], False, HARD[::-1], encoder)
    assert encoder._words.known > 100
    monkeypatch.setattr(wordpiece, "KNOWN_WORDS", 100)
    check(vocabularies[False], False, ["some new words", *HARD], encoder)
    monkeypatch.setattr(wordpiece, "KNOWN_WORDS", 10**6)
    check(vocabularies[False], False, [*HARD, "more"], encoder)


def test_nothing_and_only_blank_lines(vocabularies):
    encoder = Encoder(vocabularies[False], cased=False)
    for text, count in [("", 1), ("\n\n", 3), (" \t \n\x1f", 2)]:
        got = encoder.encode(text)
        assert got.blank.tolist() == [True] * count
        assert got.lengths.tolist() == [0] * count
        assert len(got.tokens) == 0
    got = encoder.encode("\u200b\nword")  # a character that is dropped does not make a blank line
    assert got.blank.tolist() == [False, False]
    assert got.lengths[0] == 0


def test_ids_have_two_bytes_until_the_vocabulary_is_too_large():
    pieces = ["[UNK]", *(f"w{number}" for number in range(70_000))]
    small = Encoder({piece: n for n, piece in enumerate(pieces[:65_536])}, cased=False)
    large = Encoder({piece: n for n, piece in enumerate(pieces)}, cased=False)
    assert small.encode("w65534").tokens.dtype == np.uint16
    assert large.encode("w69999 w1").tokens.tolist() == [70_000, 2]


@pytest.mark.parametrize("cased", [False, True])
def test_real_text_with_the_published_vocabularies(shared_data, cased):
    name = f"bert-base-{'cased' if cased else 'uncased'}-vocab.txt"
    pieces = (shared_data / "vocab" / name).read_text(encoding="utf-8").rstrip("\n").split("\n")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    text = (shared_data / "text/extracted/AA/wiki_07").read_text(encoding="utf-8")[:300_000]
    check(vocabulary, cased, text.split("\n") + HARD)
