"""The tokenizer of a model's folder: both forms split text equally, and text makes no special ids."""

import json

import pytest

from bert_cli.data.records.tokenizer import (
    case_of,
    files_for_model,
    model_max_length,
    read_tokenizer,
    write_vocabulary,
)
from bert_cli.errors import DataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "s", "Cat", "[", "]"]
PIECES += ["se", "##p", "mask", "é", "e", "."]


@pytest.fixture
def folder(tmp_path):
    write_vocabulary(tmp_path, "".join(f"{piece}\n" for piece in PIECES).encode(), cased=False)
    return tmp_path


def ids(tokenizer, text):
    return tokenizer.library.encode_batch([text], add_special_tokens=False)[0].ids


def test_text_is_split_into_pieces_with_their_offsets(folder):
    tokenizer = read_tokenizer(folder)
    encoded = tokenizer.library.encode_batch(["The  Cats."], add_special_tokens=False)[0]
    assert [PIECES[number] for number in encoded.ids] == ["the", "cat", "##s", "."]
    assert encoded.offsets == [(0, 3), (5, 8), (8, 9), (9, 10)]


def test_special_tokens_in_a_text_are_plain_text(folder):
    tokenizer = read_tokenizer(folder)
    special = {PIECES.index(name) for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")}
    assert not special & set(ids(tokenizer, "[SEP] the [MASK] [CLS] [PAD]"))
    assert tokenizer.special.sep == PIECES.index("[SEP]")
    assert tokenizer.pieces == tuple(PIECES)


def test_a_tokenizer_saved_by_transformers_splits_text_equally(folder, tmp_path):
    import transformers

    theirs = transformers.BertTokenizerFast.from_pretrained(folder)
    saved = tmp_path / "saved"
    theirs.save_pretrained(saved)
    assert (saved / "tokenizer.json").is_file()
    text = "The cats. É Cat"
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids(read_tokenizer(saved), text) == expected == ids(read_tokenizer(folder), text)


def test_a_cased_vocabulary_keeps_capitals(tmp_path):
    write_vocabulary(tmp_path, "".join(f"{piece}\n" for piece in PIECES).encode(), cased=True)
    assert ids(read_tokenizer(tmp_path), "Cat cat é") == [9, 6, 15]


def test_another_case_is_another_fingerprint(folder):
    before = read_tokenizer(folder).fingerprint
    assert read_tokenizer(folder).fingerprint == before
    write_vocabulary(folder, "".join(f"{piece}\n" for piece in PIECES).encode(), cased=True)
    assert read_tokenizer(folder).fingerprint != before


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path):
    with pytest.raises(
        DataError, match=r"holds neither vocab\.txt nor tokenizer\.json; copy there"
    ):
        read_tokenizer(tmp_path)


def test_a_tokenizer_that_cannot_be_used_is_rejected(folder):
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    with pytest.raises(DataError, match=r"\[MASK\] missing"):
        read_tokenizer(folder)
    messages = {
        "{": "Invalid JSON",
        "[]": "Input should be an object",
        json.dumps({"model": {"type": "BPE"}}): r"\(model.type BPE\): is no WordPiece",
        json.dumps({"model": {"type": "WordPiece", "vocab": 3}}): "cannot be read",
    }
    for text, message in messages.items():
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(DataError, match=message):
            read_tokenizer(folder)


def test_model_max_length_is_the_smaller_of_the_tokenizers_and_the_models(tmp_path):
    cases = [(128, 512, 128), (512, 128, 128), (10**30, 512, 512), (128.0, 512, 128)]
    cases += [(own, 512, 512) for own in (None, float("nan"), float("inf"), -1)]
    for own, positions, longest in cases:
        config = {} if own is None else {"model_max_length": own}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        files = files_for_model(tmp_path, positions, fills_masks=True)
        written = json.loads(files["tokenizer_config.json"])
        assert written["model_max_length"] == longest, own
        assert written["split_special_tokens"] is False


@pytest.mark.parametrize("own", ["NaN", "Infinity", "-1", "0", '"24"'])
def test_a_model_max_length_that_is_no_number_of_tokens_is_rejected(tmp_path, own):
    (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": {own}}}')
    with pytest.raises(DataError, match=r"\(model_max_length\): is .*; give it as a number"):
        model_max_length(tmp_path)


def test_the_case_of_a_tokenizer_is_known_where_its_files_say_it(tmp_path):
    def normalizer(lower, **more):
        return {"type": "BertNormalizer", "lowercase": lower, **more}

    cases = [
        (None, None, None),
        ({"do_lower_case": True}, None, (True, True)),
        ({"do_lower_case": False, "strip_accents": None}, None, (False, False)),
        ({"model_max_length": 512}, normalizer(False, strip_accents=True), (False, True)),
        ({"do_lower_case": True}, normalizer(False), (True, True)),
        (None, {"type": "NFC"}, None),
        ({"model_max_length": 512}, None, None),
    ]
    for number, (config, described, expected) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        if described is not None:
            (folder / "tokenizer.json").write_text(json.dumps({"normalizer": described}))
        names = ("do_lower_case", "strip_accents")
        assert case_of(folder) == (dict(zip(names, expected, strict=True)) if expected else {})
