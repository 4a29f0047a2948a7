"""Small models of others as they are published: random weights of transformers, tokenizers trained on the sample."""

from pathlib import Path
from typing import Any

from support.tiny_models import PIECES

ROOT = Path(__file__).parents[2]
ARTICLES = sorted((ROOT / "data/sample/articles").glob("*.wiki"))
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,  # so that outputs differ from text to text
}
DISTILLED = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "initializer_range": 0.3}
ONE_SEGMENT = {**SIZES, "type_vocab_size": 1, "max_position_embeddings": 66}
"""Two rows of positions come before the first one that a token reads."""
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "roberta": ("RobertaForMaskedLM", {**ONE_SEGMENT, "layer_norm_eps": 1e-5}, "byte-level"),
    "xlm-roberta": ("XLMRobertaModel", ONE_SEGMENT, "split"),
    "minilm": ("BertModel", {**SIZES, "max_position_embeddings": 64}, "spaces"),
    "distilbert": ("DistilBertForMaskedLM", {**DISTILLED, "max_position_embeddings": 64}, "words"),
}
"""Kind of model -> transformers' class, its sizes, and its tokenizer. Multilingual MiniLM is a BERT with Unigram."""


def write_published(folder: Path, kind: str) -> Path:
    import torch
    import transformers

    architecture, sizes, splits = MODELS[kind]
    torch.manual_seed(5)
    if splits == "words":
        folder.mkdir(parents=True)
        (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
        rows = len(PIECES)
    else:
        tokenizer = _byte_level() if splits == "byte-level" else _unigram(splits)
        names = ("bos", "pad", "eos", "unk", "mask", "cls", "sep")
        tokens = zip(names, (*SPECIAL, "<s>", "</s>"), strict=True)
        options = {f"{name}_token": token for name, token in tokens}
        library = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
        library.save_pretrained(folder)
        rows = len(library)
    model = getattr(transformers, architecture)
    model(model.config_class(vocab_size=rows, **sizes)).save_pretrained(folder)
    return folder


def _texts() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in ARTICLES]


def _unigram(splits: str) -> Any:
    """Return Unigram whose words are split at white space first, or that keeps the spaces between words."""
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.Unigram())
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces])
    parts = [pre_tokenizers.Metaspace()]
    if splits == "split":
        parts.insert(0, pre_tokenizers.WhitespaceSplit())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": [*SPECIAL], "unk_token": "<unk>", "show_progress": False}
    lines = [line for text in _texts() for line in text.split("\n")]
    tokenizer.train_from_iterator(lines, trainers.UnigramTrainer(vocab_size=600, **options))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def _byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    options = {"initial_alphabet": letters, "special_tokens": [*SPECIAL], "show_progress": False}
    tokenizer.train_from_iterator(_texts(), trainers.BpeTrainer(vocab_size=500, **options))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer
