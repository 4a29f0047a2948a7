"""A small ModernBERT as it is published: random weights of transformers, and byte-level BPE trained on the sample."""

from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

ROOT = Path(__file__).parents[2]
NAMES = ("pad", "unk", "cls", "sep", "mask")
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "local_attention": 8,
    "initializer_range": 0.3,  # so that outputs differ from text to text
}


def write_tokenizer(folder: Path, size: int = 500) -> Tokenizer:
    """Write a tokenizer.json with the special tokens and runs of spaces that ModernBERT's has."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    articles = sorted((ROOT / "data/sample/articles").glob("*.wiki"))
    bpe.train_from_iterator([path.read_text(encoding="utf-8") for path in articles], trainer)
    bpe.add_tokens([AddedToken(" " * number, normalized=False) for number in (2, 3)])
    mask = AddedToken("[MASK]", lstrip=True, normalized=False, special=True)
    bpe.add_special_tokens(["<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]", mask])
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[(token, bpe.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(str(folder / "tokenizer.json"))
    return bpe


def write_modernbert(folder: Path) -> Path:
    import torch
    import transformers

    bpe = write_tokenizer(folder)
    options = {f"{name}_token": f"[{name.upper()}]" for name in NAMES}
    options["model_input_names"] = ["input_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **options).save_pretrained(folder)
    tokens = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "cls": "[CLS]", "sep": "[SEP]"}
    ids = {f"{name}_token_id": bpe.token_to_id(token) for name, token in tokens.items()}
    torch.manual_seed(5)
    # Rounded up, as in the published models.
    config = transformers.ModernBertConfig(**SHAPE, **ids, vocab_size=512)
    transformers.ModernBertForMaskedLM(config).save_pretrained(folder)
    return folder
