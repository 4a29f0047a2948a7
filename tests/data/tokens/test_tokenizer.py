"""Text to ids: the encoder as the library does it on hard text, and the tokenizer of a model's folder."""

import gc
import json
import shutil

import numpy as np
import pytest
from tokenizers import BertWordPieceTokenizer

from bert_cli.data.tokens import encoder as module
from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.tokenizer import (
    CONFIG_FILE,
    Normalization,
    TokenizerFolder,
    read_tokenizer,
    read_vocabulary,
    write_vocabulary,
)
from bert_cli.errors import DataError
from bert_cli.facts.bert import BertConfig

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "s", "Cat", "[", "]"]
PIECES += ["se", "##p", "mask", "é", "e", "."]
DATA = "".join(f"{piece}\n" for piece in PIECES).encode()
SHAPE = BertConfig(max_position_embeddings=32)


@pytest.fixture
def folder(tmp_path):
    write_vocabulary(tmp_path, DATA, Normalization())
    return tmp_path


def ids(tokenizer, text):
    return tokenizer.library.encode_batch([text], add_special_tokens=False)[0].ids


def test_text_is_split_into_pieces_with_their_offsets_and_special_tokens_are_plain_text(folder):
    tokenizer = read_tokenizer(folder)
    encoded = tokenizer.library.encode_batch(["The  Cats."], add_special_tokens=False)[0]
    assert [PIECES[number] for number in encoded.ids] == ["the", "cat", "##s", "."]
    assert encoded.offsets == [(0, 3), (5, 8), (8, 9), (9, 10)]
    special = {PIECES.index(name) for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")}
    assert not special & set(ids(tokenizer, "[SEP] the [MASK] [CLS] [PAD]"))
    assert tokenizer.special.sep == PIECES.index("[SEP]")
    assert tokenizer.pieces == tuple(PIECES)
    words = {piece: number for number, piece in enumerate(PIECES)}
    ours = Encoder(words, Normalization()).encode("[SEP] the [MASK] [CLS] [PAD]").tokens
    assert ours.tolist() == ids(tokenizer, "[SEP] the [MASK] [CLS] [PAD]")


def model_of(tokenizer, folder):
    """Write the files of a tokenizer into the folder of a model that is trained with it."""
    folder.mkdir(exist_ok=True)
    for name, content in TokenizerFolder(tokenizer).for_model(SHAPE, fills_masks=False).items():
        (folder / name).write_bytes(content)
    return folder


ADDED = "the [E1] Cats<x> entity1 e [SEP] [MASK] cats [E1]"


@pytest.mark.parametrize("form", ["tokenizer.json", "decoder", "added_tokens.json", "names"])
def test_tokens_that_an_owner_added_have_the_ids_of_transformers(form, folder, tmp_path):
    import transformers

    first = len(PIECES)
    saved = shutil.copytree(folder, tmp_path / "saved")
    plain = {"content": "[E1]", "lstrip": False, "rstrip": True, "single_word": False}
    config = json.loads((saved / CONFIG_FILE).read_text())
    if form == "tokenizer.json":
        theirs = transformers.BertTokenizerFast.from_pretrained(folder)
        theirs.add_tokens(["[E1]", "entity1"])
        theirs.add_special_tokens({"extra_special_tokens": ["<x>"]})
        theirs.save_pretrained(saved)
        (saved / "vocab.txt").unlink()
        config = json.loads((saved / CONFIG_FILE).read_text())
    elif form == "decoder":
        config["added_tokens_decoder"] = {
            str(first): {**plain, "normalized": True, "special": False},
            str(first + 1): {**plain, "content": "<x>", "normalized": False, "special": True},
        }
    elif form == "added_tokens.json":
        (saved / form).write_text(json.dumps({"entity1": first + 1, "[E1]": first}))
    else:
        config["additional_special_tokens"] = ["<x>", {**plain, "__type": "AddedToken"}]
    (saved / CONFIG_FILE).write_text(json.dumps(config))
    if form != "tokenizer.json":
        with pytest.raises(
            DataError, match=r"added token '.*'\): is not in a tokenizer.json; make"
        ):
            read_tokenizer(saved)
        transformers.AutoTokenizer.from_pretrained(saved).save_pretrained(saved)
    ours = read_tokenizer(saved)
    assert len(ours.pieces) > first
    # transformers makes the special tokens of BERT from text, this tool never does.
    text = ADDED.replace("[SEP]", "").replace("[MASK]", "")
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids(ours, text) == expected and max(expected) >= first
    assert not {2, 3, 4} & set(ids(ours, ADDED))
    # The files of a model that is trained with it split text equally.
    trained = model_of(saved, tmp_path / "trained")
    theirs = transformers.AutoTokenizer.from_pretrained(trained)
    assert ids(read_tokenizer(trained), text) == expected
    assert read_tokenizer(trained).fingerprint == ours.fingerprint
    assert theirs(text, add_special_tokens=False)["input_ids"] == expected


def test_added_tokens_that_cannot_have_their_ids_are_refused(folder):
    model_of(folder, folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    token = {**description["added_tokens"][0], "content": "[E1]", "id": len(PIECES) + 3}
    description["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    problem = r"\(added token '\[E1\]', id 21\): the ids of added tokens have a gap"
    with pytest.raises(DataError, match=problem):
        read_tokenizer(folder)


@pytest.mark.parametrize("cased", [False, True])
def test_a_models_tokenizer_json_gives_transformers_the_ids_and_keeps_the_fingerprint(
    cased, folder, tmp_path
):
    """Also for a model that is trained from such a model."""
    import tokenizers
    import transformers

    write_vocabulary(folder, DATA, Normalization(cased=cased, split_chinese=cased))
    before, text = read_tokenizer(folder), "The cats. É Cat maskse [SEP] 東京"
    for name in ("first", "second"):
        saved = model_of(folder, tmp_path / name)
        after = read_tokenizer(saved)
        assert after.fingerprint == before.fingerprint
        assert ids(after, text) == ids(before, text)
        folder = saved
    theirs = transformers.AutoTokenizer.from_pretrained(saved)
    expected = [2, *ids(before, text), 3, *ids(before, "the"), 3]
    pair = theirs(text, "the")
    assert pair["input_ids"] == expected
    assert pair["token_type_ids"] == [0] * (len(expected) - 2) + [1] * 2
    alone = tokenizers.Tokenizer.from_file(str(saved / "tokenizer.json"))
    assert alone.encode("the cats .", "the").ids == [2, 5, 6, 7, 17, 3, 5, 3]
    assert alone.decode([2, 5, 6, 7, 17, 3]) == "the cats."
    assert alone.encode("[MASK]").ids == [2, 4, 3]


def test_a_models_tokenizer_names_a_class_and_tokens_that_every_transformers_has(folder):
    """A folder of Google's has no tokenizer_config.json; the default names of inputs differ between versions."""
    (folder / CONFIG_FILE).unlink()
    for has_segments in (True, False):
        shape = BertConfig(max_position_embeddings=32, type_vocab_size=1 + has_segments)
        files = TokenizerFolder(folder).for_model(shape, fills_masks=True)
        config = json.loads(files[CONFIG_FILE])
        assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
        tokens = {config[f"{name}_token"] for name in ("pad", "unk", "cls", "sep", "mask")}
        assert tokens == set(PIECES[:5])
        segments = ["token_type_ids"] * has_segments
        assert config["model_input_names"] == ["input_ids", *segments, "attention_mask"]
    (folder / CONFIG_FILE).write_text('{"mask_token": {"content": "[MASK]", "lstrip": true}}')
    config = json.loads(TokenizerFolder(folder).for_model(SHAPE, fills_masks=True)[CONFIG_FILE])
    assert config["mask_token"] == {"content": "[MASK]", "lstrip": True}


def test_a_vocabulary_that_a_tokenizer_json_replaces_is_not_read(folder):
    model_of(folder, folder)
    description = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(description, indent=2))
    theirs = read_tokenizer(folder)
    (folder / "vocab.txt").write_text("broken\n\n")
    assert read_tokenizer(folder).fingerprint == theirs.fingerprint
    assert ids(theirs, "cats [SEP]") == [6, 7, 10, 12, 13, 11]


def test_a_cased_vocabulary_keeps_capitals_and_has_another_fingerprint(folder):
    before = read_tokenizer(folder).fingerprint
    assert read_tokenizer(folder).fingerprint == before
    write_vocabulary(folder, DATA, Normalization(cased=True))
    assert ids(read_tokenizer(folder), "Cat cat é") == [9, 6, 15]
    assert read_tokenizer(folder).fingerprint != before


def test_model_max_length_is_the_smaller_of_the_tokenizers_and_the_models(tmp_path):
    cases = [(128, 512, 128), (512, 128, 128), (10**30, 512, 512), (None, 512, 512)]
    for own, positions, longest in cases:
        (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_max_length": own}))
        shape = BertConfig(max_position_embeddings=positions)
        written = json.loads(
            TokenizerFolder(tmp_path).for_model(shape, fills_masks=True)[CONFIG_FILE]
        )
        assert (written["model_max_length"], written["split_special_tokens"]) == (longest, False)
    for wrong in ("NaN", "-1", "0", '"24"'):
        (tmp_path / CONFIG_FILE).write_text(f'{{"model_max_length": {wrong}}}')
        with pytest.raises(DataError, match=r"\(model_max_length\): is .*; write it as a number"):
            _ = TokenizerFolder(tmp_path).max_length


def test_the_normalization_of_a_tokenizer_is_known_where_its_files_say_the_case(tmp_path):
    upper = {"type": "BertNormalizer", "lowercase": False}
    whole_words = {"do_lower_case": True, "tokenize_chinese_chars": False}
    cases = [
        ({}, None, None),
        ({"do_lower_case": True}, None, Normalization(False, True, True)),
        ({"do_lower_case": False, "strip_accents": None}, None, Normalization(True, False)),
        ({"model_max_length": 9}, upper | {"strip_accents": True}, Normalization(True, True)),
        ({"do_lower_case": True, "strip_accents": False}, upper, Normalization(False, False)),
        ({}, upper | {"handle_chinese_chars": False}, Normalization(True, False, False)),
        (whole_words, None, Normalization(False, True, False)),
        ({}, {"type": "NFC"}, None),
    ]
    for config, normalizer, expected in cases:
        (tmp_path / CONFIG_FILE).write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").unlink(missing_ok=True)
        if normalizer is not None:
            (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": normalizer}))
        assert TokenizerFolder(tmp_path).normalization == expected


# --- the encoder, judged by the library

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


def check(vocabulary, normalization, lines, encoder=None):
    """Every line's tokens, and which lines are blank, against the library."""
    encoder = encoder or Encoder(vocabulary, normalization)
    lines = [line.replace("\n", " ") for line in lines]
    got = encoder.encode("\n".join(lines))
    library = BertWordPieceTokenizer(
        vocabulary,
        lowercase=not normalization.cased,
        strip_accents=normalization.strip_accents,
        handle_chinese_chars=normalization.split_chinese,
    )
    expected = [library.encode(line, add_special_tokens=False).ids for line in lines]
    ends = np.cumsum(got.lengths)
    for line, end, length, numbers in zip(lines, ends, got.lengths, expected, strict=True):
        assert got.tokens[end - length : end].tolist() == numbers, repr(line)
    assert ends[-1] == len(got.tokens)
    spaces = module._CONTROL_SPACES + " \t\r"
    assert got.blank.tolist() == [not line.strip(spaces).strip() for line in lines]
    return encoder


@pytest.mark.parametrize("cased", [False, True])
def test_hard_lines_are_encoded_as_the_library_does(vocabularies, cased):
    check(vocabularies[cased], Normalization(cased=cased), HARD)
    check(vocabularies[cased], Normalization(cased=cased), [""])
    check(vocabularies[cased], Normalization(cased=cased), [" \t ", "\x1f", "\u200b"])


@pytest.mark.parametrize("cased", [False, True])
def test_every_character_alone_and_between_letters(vocabularies, cased):
    points = [point for point in range(0x30000) if not 0xD800 <= point < 0xE000 and point != 10]
    step = 17  # all of them take six seconds
    lines = [f"{chr(p)} a{chr(p)}b {chr(p)}{chr(p)}" for p in points[:0x800] + points[0x800::step]]
    check(vocabularies[cased], Normalization(cased=cased), lines)


def test_cached_words_and_words_after_clearing_the_cache_are_encoded_equally(
    vocabularies, monkeypatch
):
    encoder = check(vocabularies[False], Normalization(), HARD)
    check(vocabularies[False], Normalization(), HARD[::-1], encoder)
    assert len(encoder._ends) > 100
    monkeypatch.setattr(module, "KNOWN_WORDS", 100)
    check(vocabularies[False], Normalization(), ["some new words", *HARD], encoder)
    monkeypatch.setattr(module, "KNOWN_WORDS", 10**6)
    check(vocabularies[False], Normalization(), [*HARD, "more"], encoder)


def test_the_memory_of_forgotten_words_is_freed_without_garbage_collection(
    vocabularies, monkeypatch
):
    encoder = Encoder(vocabularies[False], Normalization())
    encoder.encode("the words of a text\n")
    monkeypatch.setattr(module, "KNOWN_WORDS", 1)
    gc.collect()
    gc.disable()  # as while records are made
    try:
        encoder.encode("more\n")
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("cased", [False, True])
def test_real_text_with_the_published_vocabularies(shared_data, cased):
    name = f"bert-base-{'cased' if cased else 'uncased'}-vocab.txt"
    pieces = (shared_data / "vocab" / name).read_text(encoding="utf-8").rstrip("\n").split("\n")
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    text = (shared_data / "text/extracted/AA/wiki_07").read_text(encoding="utf-8")[:300_000]
    check(vocabulary, Normalization(cased=cased), text.split("\n") + HARD)


def test_tokenizer_config_decides_over_the_normalizer_of_another_tokenizer_json(folder):
    library = TokenizerFolder(folder).tokenizer.library
    library.post_processor = None
    (folder / "tokenizer.json").write_text(library.to_str())  # lower-cases
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for kind, lower, expected in (
        ("BertTokenizer", True, "ab é"),
        ("BertTokenizer", False, "Ab É"),
        ("PreTrainedTokenizerFast", False, "ab e"),
    ):
        changes = {"tokenizer_class": kind, "do_lower_case": lower, "strip_accents": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | changes))
        normalizer = TokenizerFolder(folder).tokenizer.library.normalizer
        assert normalizer.normalize_str("Ab É") == expected


@pytest.mark.parametrize(
    ("part", "name", "value", "is_refused"),
    [
        ("normalizer", "strip_accents", None, False),
        ("normalizer", "strip_accents", True, False),  # as BERT does where it lower-cases
        ("normalizer", "clean_text", False, True),
        ("pre_tokenizer", "type", "Whitespace", True),
        ("model", "unk_token", "[PAD]", True),
        ("model", "continuing_subword_prefix", "@@", True),
        ("model", "max_input_chars_per_word", 50, True),
        ("model", "vocab", {piece: 2 * number for number, piece in enumerate(PIECES)}, True),
    ],
)
def test_a_tokenizer_json_is_the_vocabulary_of_bert_or_refused(
    part, name, value, is_refused, folder, tmp_path
):
    library = read_tokenizer(folder).library
    description = json.loads(library.to_str())
    known = description["model"]["vocab"]
    description["model"]["vocab"] = {piece: known[piece] for piece in sorted(known)}
    assert name in description[part]
    description[part][name] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    if not is_refused:
        vocabulary = read_vocabulary(tmp_path / "tokenizer.json")
        assert vocabulary.pieces == tuple(PIECES)
        assert vocabulary.sha256 == read_vocabulary(folder / "vocab.txt").sha256
        return
    message = (
        rf"tokenizer.json \({part}.{name}\): (is .*, but BERT has .*; use a BERT|has ids without)"
    )
    with pytest.raises(DataError, match=message):
        read_vocabulary(tmp_path / "tokenizer.json")
