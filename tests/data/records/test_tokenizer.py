"""The tokenizer of a model's folder: both forms cut text alike, and text makes no special ids."""

import json

import pytest

from bert_cli.data.records.tokenizer import (
    case_of,
    files_for_model,
    model_max_length,
    read_tokenizer,
)
from bert_cli.data.records.vocab import write_vocabulary
from bert_cli.errors import DataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "s", "Cat", "[", "]"]
PIECES += ["se", "##p", "mask", "é", "e", "."]


@pytest.fixture
def folder(tmp_path):
    write_vocabulary(tmp_path, "".join(f"{piece}\n" for piece in PIECES).encode(), cased=False)
    return tmp_path


def ids(tokenizer, text):
    return tokenizer.library.encode_batch([text], add_special_tokens=False)[0].ids


def test_text_is_cut_into_pieces_with_their_places(folder):
    tokenizer = read_tokenizer(folder)
    encoded = tokenizer.library.encode_batch(["The  Cats."], add_special_tokens=False)[0]
    assert [PIECES[number] for number in encoded.ids] == ["the", "cat", "##s", "."]
    assert encoded.offsets == [(0, 3), (5, 8), (8, 9), (9, 10)]


def test_special_tokens_in_a_text_are_only_text(folder):
    tokenizer = read_tokenizer(folder)
    special = {PIECES.index(name) for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")}
    assert not special & set(ids(tokenizer, "[SEP] the [MASK] [CLS] [PAD]"))
    assert tokenizer.special.sep == PIECES.index("[SEP]")
    assert tokenizer.pieces == tuple(PIECES)


def test_what_transformers_saves_is_read_as_it_cuts(folder, tmp_path):
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


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"holds neither vocab\.txt nor tokenizer\.json; copy there"
    ):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        (json.dumps({"model": {"type": "BPE"}}), r"\(model.type BPE\): is no WordPiece"),
        (json.dumps({"model": {"type": "WordPiece", "vocab": 3}}), "cannot be read"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tmp_path, text, message):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path)


def test_a_vocabulary_without_a_special_token_is_refused(folder):
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    with pytest.raises(DataError, match=r"\[MASK\] missing"):
        read_tokenizer(folder)


@pytest.mark.parametrize(
    ("own", "positions", "longest"),
    [(128, 512, 128), (512, 128, 128), (10**30, 512, 512), (128.0, 512, 128), (None, 512, 512),
     (float("nan"), 512, 512), (float("inf"), 512, 512), (-1, 512, 512)],
)  # fmt: skip
def test_a_model_takes_as_many_tokens_as_it_and_its_tokenizer_can(
    tmp_path, own, positions, longest
):
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({} if own is None else {"model_max_length": own}))
    written = files_for_model(tmp_path, positions, fills_masks=True)["tokenizer_config.json"]
    assert json.loads(written)["model_max_length"] == longest


@pytest.mark.parametrize("own", ["NaN", "Infinity", "-1", "0", '"24"'])
def test_a_longest_text_that_is_no_number_of_tokens_is_refused(tmp_path, own):
    (tmp_path / "tokenizer_config.json").write_text(f'{{"model_max_length": {own}}}')
    with pytest.raises(DataError, match=r"\(model_max_length\): is .*; give it as a number"):
        model_max_length(tmp_path)


@pytest.mark.parametrize(
    ("config", "described", "said"),
    [
        (None, None, {}),
        ({"do_lower_case": True}, None, {"do_lower_case": True, "strip_accents": True}),
        (
            {"do_lower_case": False, "strip_accents": None},
            None,
            {"do_lower_case": False, "strip_accents": False},
        ),
        (
            {"model_max_length": 512},
            {"type": "BertNormalizer", "lowercase": False, "strip_accents": True},
            {"do_lower_case": False, "strip_accents": True},
        ),
        (
            {"do_lower_case": True},
            {"type": "BertNormalizer", "lowercase": False},
            {"do_lower_case": True, "strip_accents": True},
        ),
        (None, {"type": "NFC"}, {}),
        ({"model_max_length": 512}, None, {}),
    ],
)
def test_the_case_of_a_tokenizer_is_known_where_its_files_say_it(tmp_path, config, described, said):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if described is not None:
        (tmp_path / "tokenizer.json").write_text(json.dumps({"normalizer": described}))
    assert case_of(tmp_path) == said
