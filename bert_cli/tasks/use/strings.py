"""The tokenizer of a model in TensorFlow, for exports that take strings, compared with the tokenizer itself."""

import json
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.tokens.notation import WORDPIECE
from bert_cli.data.tokens.tokenizer import TextTokenizer
from bert_cli.errors import CheckpointError, ConfigError
from bert_cli.files import JSONObject
from bert_cli.tasks.run.opened import INPUTS

Encoder = Callable[..., dict[str, tf.Tensor]]
"""One or two columns of strings [B] -> `INPUTS` by name."""
LONGEST_WORD = 100
"""Characters; a longer word is [UNK]."""
# Characters that BERT's tokenizer removes: control, format and private-use characters, but not tab and line ends.
CLEANED = r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\p{Cf}\p{Co}\x{FFFD}]"
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
"""Texts for which an encoder must give the tokenizer's pieces."""


def text_encoder(tokenizer: TextTokenizer, length: int) -> Encoder:
    """Return the tokenizer in TensorFlow, which truncates texts to `length` tokens as in training.

    A second text without tokens adds no [SEP], and special tokens in a text are plain characters.
    Raises ConfigError for a tokenizer that does not split Chinese characters, or with added tokens.
    """
    import tensorflow_text as text

    normalizer = _normalizer_of(tokenizer)
    lowers = normalizer.get("lowercase")
    strips = normalizer.get("strip_accents")
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
        # Not by tensorflow-text, which decomposes compatibility characters: ½ becomes 1⁄2.
        texts = tf.strings.regex_replace(texts, CLEANED, "")
        if lowers if strips is None else strips:
            texts = text.normalize_utf8(texts, "NFD")
            texts = tf.strings.regex_replace(texts, r"\p{Mn}", "")
        if lowers:
            # Before lower-casing, which would give a word's last sigma its final form.
            texts = tf.strings.regex_replace(texts, "Σ", "σ")
            texts = tf.strings.lower(texts, encoding="utf-8")
        # ASCII only: a repeated class of all letters exceeds the memory of a regular expression. In other scripts,
        # words between 100 characters and 400 bytes are split into pieces. No vocabulary has \ue000, so it becomes
        # [UNK].
        return tf.strings.regex_replace(texts, rf"[0-9A-Za-z]{{{LONGEST_WORD + 1},}}", "\ue000")

    def joined(parts: list[tf.RaggedTensor]) -> tuple[tf.RaggedTensor, tf.RaggedTensor]:
        trimmed = text.RoundRobinTrimmer(length - 1 - len(parts)).trim(parts)
        ids, segments = text.combine_segments(trimmed, special.cls, special.sep)
        return ids, segments

    def encode(*texts: tf.Tensor) -> dict[str, tf.Tensor]:
        parts = [pieces.tokenize(normalized(column)) for column in texts]
        ids, segments = joined(parts[:1])
        if len(parts) == 2:
            both = zip((ids, segments), joined(parts), strict=True)
            # The rows of single texts come first, then the rows of pairs.
            count = ids.nrows()
            rows = tf.range(count) + tf.where(parts[1].row_lengths() > 0, count, 0)
            ids, segments = (tf.gather(tf.concat(pair, 0), rows) for pair in both)
        return {
            "input_ids": ids.to_tensor(special.pad),
            "attention_mask": tf.ones_like(ids).to_tensor(0),
            "token_type_ids": segments.to_tensor(0),
        }

    return encode


def _normalizer_of(tokenizer: TextTokenizer) -> JSONObject:
    """Return a tokenizer's normalizer. Raises ConfigError if tensorflow-text cannot do the same."""
    description = json.loads(tokenizer.library.to_str())
    normalizer: JSONObject = description.get("normalizer") or {}
    problem = ""
    if tokenizer.notation is not WORDPIECE:
        problem = f"tensorflow-text has no {tokenizer.notation.name}"
    elif added := [token["content"] for token in description["added_tokens"]]:
        problem = f"tensorflow-text lacks the tokens that the model's owner added ({added[0]})"
    elif not normalizer.get("handle_chinese_chars", True):
        problem = "tensorflow-text splits Chinese characters, and the model's tokenizer does not"
    if problem:
        raise ConfigError("texts (true)", problem, "leave out --texts and give token ids")
    return normalizer


def compare_encoders(tokenizer: TextTokenizer, encoder: Encoder, length: int) -> None:
    """Raise CheckpointError with the text if an encoder splits a text differently from the tokenizer."""
    for second in (None, COMPARED[::-1]):
        features, _ = encode_texts(tokenizer, COMPARED, second, {}, max_seq_length=length)
        texts = [list(COMPARED)] if second is None else [list(COMPARED), list(second)]
        columns = encoder(*map(tf.constant, texts))
        rows = features.batch(np.arange(len(COMPARED)), int(features.lengths.max()))
        ids = np.where(rows["input_mask"], rows["input_ids"], tokenizer.special.pad)
        expected = zip(INPUTS, (ids, rows["input_mask"], rows["segment_ids"]), strict=True)
        for name, column in expected:
            result = columns[name].numpy()
            wrong = result.shape != column.shape or (result != column).any(axis=1)
            if np.any(wrong):
                where = f"texts ({COMPARED[int(np.argmax(wrong))][:40]!r})"
                problem = "is split differently by the export and by the model's tokenizer"
                raise CheckpointError(where, problem, "leave out --texts and give token ids")
