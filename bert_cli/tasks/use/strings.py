"""Text inside the graph: the tokenizer of a model as operations of tensorflow-text.

A SavedModel with it takes strings. Its normalization is written out, because tensorflow-text's own
takes compatibility characters apart (½ becomes 1⁄2) where BERT's tokenizer keeps them; written so,
6,000 paragraphs of Wikipedia became the same pieces as here. What was built is compared with the
tokenizer on texts of many scripts before it is used.
"""

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.records.sentence_pairs import SpecialIds
from bert_cli.data.records.tokenizer import TextTokenizer
from bert_cli.errors import CheckpointError, ConfigError

LONGEST_WORD = 100
"""Characters; a longer word is [UNK]."""
# Characters that no vocabulary holds: private, and gone from any text that was cleaned.
UNKNOWN_WORD = "\ue000"
# What BERT's tokenizer takes out: control, format and private characters, but not tab and line ends.
CLEANED = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\p{Cf}\p{Co}\x{FFFD}]"
# In other scripts words between 100 characters and 400 bytes are cut where they would be [UNK]: the
# class of all letters with a count needs more memory than a regular expression is given.
TOO_LONG = rf"[0-9A-Za-z]{{{LONGEST_WORD + 1},}}"

COMPARED = (
    "The cat sat on the mat, didn't it?",
    "Ångström naïve résumé e\u0301 ½ 8″ … ﬁ İstanbul ΑΣ ΣΑΣ ß",
    "東京タワー 한국어 हिन्दी भाषा تجربة кириллица עברית",
    "ไม่มีช่องว่างระหว่างคำในภาษาไทยเลยแม้แต่น้อยจริงๆนะ",
    "a\u00a0b\tc\x01d\ufffde\u200bf\u00adg",
    "[MASK] [SEP] $5.00 ~50% `x^2` <tag> C++ snake_case 😀",
    "x" * 100 + " " + "y" * 101,
    "",
)


def columns_of_texts(tokenizer: TextTokenizer, places: int) -> Callable[..., dict[str, tf.Tensor]]:
    """A function of strings [B], or of two columns of them, that gives `input_ids`,
    `attention_mask` and `token_type_ids` [B, S], cut to so many places as at training.

    As there, a second text without tokens adds no [SEP], and special tokens in a text are plain.
    Raises ConfigError for a tokenizer that is not BERT's own, or without tensorflow-text.
    """
    import tensorflow_text as text

    described = json.loads(tokenizer.library.to_str())
    normalizer, model = described.get("normalizer") or {}, described["model"]
    usual = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    rest = {"max_input_chars_per_word": LONGEST_WORD, "continuing_subword_prefix": "##"}
    if any(normalizer.get(k) != v for k, v in usual.items()) or any(
        model.get(k) != v for k, v in rest.items()
    ):
        raise ConfigError(
            "texts (tokenizer): is set up in another way than BERT's; leave out --texts and give ids"
        )
    lowers = bool(normalizer.get("lowercase"))
    strips = normalizer.get("strip_accents")
    strips = lowers if strips is None else bool(strips)
    pieces = text.FastBertTokenizer(
        vocab=list(tokenizer.pieces),
        suffix_indicator="##",
        max_bytes_per_word=4 * LONGEST_WORD,
        token_out_type=tf.int32,
        unknown_token="[UNK]",
        lower_case_nfd_strip_accents=False,
    )
    special = tokenizer.special

    def normalized(texts: tf.Tensor) -> tf.Tensor:
        texts = tf.strings.regex_replace(texts, CLEANED, "")
        if strips:
            texts = text.normalize_utf8(texts, "NFD")
            texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        if lowers:
            # By itself: the lower case of a whole word would end in another sigma.
            texts = tf.strings.regex_replace(texts, "Σ", "σ")
            texts = tf.strings.lower(texts, encoding="utf-8")
        return tf.strings.regex_replace(texts, TOO_LONG, UNKNOWN_WORD)

    def columns(*texts: tf.Tensor) -> dict[str, tf.Tensor]:
        found = [pieces.tokenize(normalized(column)) for column in texts]
        ids, segments = _joined(found[:1], special, places)
        if len(found) == 2:
            both = zip((ids, segments), _joined(found, special, places), strict=True)
            # Each row from the single texts or, behind them, from the pairs.
            count = ids.nrows()
            rows = tf.range(count) + tf.where(found[1].row_lengths() > 0, count, 0)
            ids, segments = (tf.gather(tf.concat(pair, 0), rows) for pair in both)
        return {
            "input_ids": ids.to_tensor(special.pad),
            "attention_mask": tf.ones_like(ids).to_tensor(0),
            "token_type_ids": segments.to_tensor(0),
        }

    return columns


def _joined(
    found: list[tf.RaggedTensor], special: SpecialIds, positions: int
) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
    """Ids and segments of one or two texts [B, (S)] between their special tokens, cut to the positions."""
    import tensorflow_text as text

    trimmed = text.RoundRobinTrimmer(positions - 1 - len(found)).trim(found)
    ids, segments = text.combine_segments(trimmed, special.cls, special.sep)
    return ids, segments


def compare(tokenizer: TextTokenizer, columns: Callable[..., Any], places: int) -> None:
    """Refuse a graph that cuts a text in another way than the tokenizer; CheckpointError names it."""
    for second in (None, COMPARED[::-1]):
        features, _ = encode_texts(tokenizer, COMPARED, second, {}, max_seq_length=places)
        given = [list(COMPARED)] if second is None else [list(COMPARED), list(second)]
        found = columns(*map(tf.constant, given))
        longest = int(features.lengths.max())
        for number, text in enumerate(COMPARED):
            begin, end = features.starts[number], features.ends[number]
            length = int(end - begin)
            row = {name: found[name].numpy()[number].tolist() for name in found}
            rest = [0] * (longest - length)
            pad = [tokenizer.special.pad] * len(rest)
            if (
                row["input_ids"] != [*features.tokens[begin:end].tolist(), *pad]
                or row["attention_mask"] != [*[1] * length, *rest]
                or row["token_type_ids"] != [*features.segments[begin:end].tolist(), *rest]
            ):
                raise CheckpointError(
                    f"texts ({text[:40]!r}): becomes other pieces in the export than in the model's tokenizer; "
                    "leave out --texts and give ids"
                )
