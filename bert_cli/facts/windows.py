"""Windows in which a model reads a text that is longer than the model: their sizes, and when they skip no text.

A window of a question is [CLS] question [SEP] part of the paragraph [SEP]; windows start `doc_stride` tokens apart.
"""

from bert_cli.text import count

DOC_STRIDE = 128
QUERY_LENGTH = 64  # tokens of a question
ANSWER_LENGTH = 30  # tokens of an answer
# Special tokens of a window: [CLS] and two [SEP].
QUESTION_SPECIALS = 3


def window_error(
    max_seq_length: int, doc_stride: int, max_query_length: int = 0
) -> tuple[str, str] | None:
    """Return problem and remedy of a max_seq_length whose windows would skip text."""
    tokens = max_seq_length - QUESTION_SPECIALS - max_query_length
    if tokens >= doc_stride:
        return None
    reserved = "the special tokens"
    if max_query_length:
        reserved = f"max_query_length {max_query_length} and the special tokens"
    problem = f"{max_seq_length} leaves {count(max(0, tokens), 'token')} of a text after {reserved}, fewer than "
    remedy = f"raise it to {max_seq_length + doc_stride - tokens}, or lower the others"
    return f"{problem}doc_stride ({doc_stride})", remedy
