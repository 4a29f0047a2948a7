"""Byte-level BPE: the ids of transformers, words, spaces and masks, lines of records, and kinds that are refused."""

import json

import numpy as np
import pytest
from support.byte_level import write_tokenizer

from bert_cli.data.finetune.conll import Sentences, word_features
from bert_cli.data.tokens.encoder import Encoder, encoder_of
from bert_cli.data.tokens.tokenizer import (
    SPECIAL_TOKENS,
    Normalization,
    TokenizerFolder,
    read_tokenizer,
    read_vocabulary,
)
from bert_cli.data.tokens.vocab import find_vocabulary
from bert_cli.errors import DataError
from bert_cli.facts.modernbert import ModernBertConfig

TEXTS = [
    "The heart is a muscle, isn't it?",
    "Two  spaces, three   spaces,      many; and a tab\t.",
    "東京 は 大きい 😀👍🏽 ok",
    "  white space at both ends ",
    "é and e\u0301, ﬁ, \u00a0 and \u200b",
    "an added token <|endoftext|> in a text",
    "",
    " ",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    write_tokenizer(folder)
    return folder


def ids(tokenizer, text):
    return tokenizer.library.encode_batch_fast([text], add_special_tokens=False)[0].ids


def test_texts_have_the_ids_of_transformers_and_special_tokens_are_plain_text(folder):
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ours = read_tokenizer(folder)
    for text in TEXTS:
        assert ids(ours, text) == theirs(text, add_special_tokens=False)["input_ids"], text
    assert len(ours.pieces) == len(theirs)
    numbers = [theirs.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS]
    assert list(vars(ours.special).values()) == numbers
    assert not {*numbers} & {*ids(ours, "the [SEP] and [MASK] [CLS] [PAD] [UNK]")}
    assert ours.notation.shown(ours.pieces[ids(ours, "of the")[-1]]) == " the"


def test_a_word_alone_has_the_pieces_that_it_has_in_a_text(folder):
    tokenizer = read_tokenizer(folder)
    words = ["The", "heart", "of", "東京", "."]
    parts = tokenizer.encode_words(words)
    tokens = [number for part in parts for number in part]
    assert tokens == ids(tokenizer, f" {' '.join(words)}")
    features, _ = word_features(Sentences([words], [[1, 2, 3, 4, 5]], ("O",) * 6), tokenizer, 64)
    special = tokenizer.special
    assert features.tokens.tolist() == [special.cls, *tokens, special.sep]
    first = np.cumsum([1, *map(len, parts)])[:-1]
    assert np.flatnonzero(features.position_labels["label_weights"]).tolist() == first.tolist()
    assert features.position_labels["labels"][first].tolist() == [1, 2, 3, 4, 5]


def test_offsets_are_those_of_the_text_of_a_piece_without_its_space(folder):
    text = "The heart  of 東京."
    (encoded,) = read_tokenizer(folder).library.encode_batch([text], add_special_tokens=False)
    covered = [text[first:last] for first, last in encoded.offsets]
    assert "heart" in "".join(covered) and not any(part != part.strip() for part in covered)
    assert {*text} - {" "} == {*"".join(covered)}


def test_a_mask_takes_the_spaces_before_it_where_the_tokenizer_says_so(folder, tmp_path):
    text = "the [MASK], an  [MASK]   [MASK][SEP]"
    tokenizer = read_tokenizer(folder)
    tokens = tokenizer.with_masks.encode(text, add_special_tokens=False).ids
    spaces = ids(tokenizer, "   ")
    mask = tokenizer.special.mask
    expected = [*ids(tokenizer, "the"), mask, *ids(tokenizer, ", an"), *ids(tokenizer, "  "), mask]
    assert tokens == [*expected, *spaces, mask, *ids(tokenizer, "[SEP]")]
    description = json.loads((folder / "tokenizer.json").read_text())
    for token in description["added_tokens"]:
        token["lstrip"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    other = read_tokenizer(tmp_path)
    tokens = other.with_masks.encode("the [MASK]", add_special_tokens=False).ids
    assert tokens == [*ids(other, "the "), mask] != [*ids(other, "the"), mask]


def test_words_begin_at_a_space_or_a_mark_and_bytes_are_counted_without_spaces(folder):
    vocabulary = find_vocabulary(str(folder), cased=False)
    tokenizer = read_tokenizer(folder)
    for text in TEXTS[:4]:
        tokens = ids(tokenizer, text)
        assert vocabulary.text_bytes[tokens].sum() == len("".join(text.split()).encode())
    tokens = ids(tokenizer, " heartiest hearty, isn't 東京")
    begins = np.flatnonzero(~vocabulary.is_continuation[tokens])
    words = [
        tokenizer.library.decode(part.tolist()) for part in np.split(np.array(tokens), begins[1:])
    ]
    assert words == [" heartiest", " hearty", ",", " isn", "'t", " 東京"]
    assert not vocabulary.is_continuation[list(vars(vocabulary.special).values())].any()


def test_a_line_after_another_line_of_its_document_begins_with_a_space(folder):
    vocabulary = find_vocabulary(str(folder / "tokenizer.json"), cased=False)
    tokenizer = read_tokenizer(folder)
    text = "The heart beats.\nIt is a muscle. \n\n  Silk shines.\n東京\n"
    encoded = encoder_of(vocabulary).encode(text)
    assert tokenizer.library.decode(encoded.tokens.tolist()) == (
        "The heart beats. It is a muscle.Silk shines. 東京"
    )
    expected = ["The heart beats.", " It is a muscle.", "", "Silk shines.", " 東京", ""]
    assert encoded.lengths.tolist() == [len(ids(tokenizer, line)) for line in expected]
    words = Encoder({"[UNK]": 0}, Normalization()).encode(text)
    assert encoded.blank.tolist() == words.blank.tolist()
    assert encoded.tokens.dtype == np.uint16


def test_the_tokenizer_is_saved_unchanged_and_opens_in_every_transformers(folder, tmp_path):
    config = {"tokenizer_class": "TokenizersBackend", "cls_token": "[CLS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = find_vocabulary(str(folder), cased=False)
    vocabulary.save(tmp_path)
    for path in folder.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    files = TokenizerFolder(tmp_path).for_model(ModernBertConfig(), fills_masks=True)
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    config = json.loads(files["tokenizer_config.json"])
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["mask_token"] == "[MASK]"
    (tmp_path / "tokenizer.json").write_bytes(files["tokenizer.json"] + b" ")
    with pytest.raises(DataError, match="is not the vocabulary that the records were made with"):
        read_vocabulary(tmp_path / "tokenizer.json", vocabulary.sha256)
