"""Other tools open a checkpoint: transformers computes and tokenizes the same."""

import numpy as np
import pytest
from support.checkpoints import build, save, settings_of, trained
from support.model_inputs import make_examples
from support.settings import SHAPE

from bert_cli.data.tokens.encoder import Encoder
from bert_cli.data.tokens.tokenizer import Normalization, write_vocabulary


@pytest.mark.parametrize("scaling", [None, "u-mup"])
def test_transformers_opens_a_checkpoint_and_computes_the_same(scaling, tmp_path):
    import torch
    import transformers

    engine, *rest = trained(settings_of(scaling=scaling))
    saved = save(tmp_path, *rest)
    theirs, report = transformers.AutoModelForPreTraining.from_pretrained(
        saved, output_loading_info=True
    )
    assert type(theirs) is transformers.BertForPreTraining and not any(report.values()), report
    batch = make_examples(SHAPE["vocab_size"], 3, 16, 4)
    (stage,) = engine.replicas[0]
    hidden = None
    for block in stage.body:
        hidden = block(hidden, batch, None)
    mlm, nsp = stage.head.logits(hidden)
    names = {"input_ids": "input_ids", "attention_mask": "input_mask", "token_type_ids": "segment_ids"}  # fmt: skip
    inputs = {theirs: torch.tensor(batch[ours]).long() for theirs, ours in names.items()}
    with torch.no_grad():
        out = theirs.eval()(**inputs)
    at_masked = out.prediction_logits.numpy()[np.arange(3)[:, None], batch["masked_lm_positions"]]
    assert np.abs(np.asarray(mlm) - at_masked).max() < 1e-5
    assert np.abs(np.asarray(nsp) - out.seq_relationship_logits.numpy()).max() < 1e-5


@pytest.mark.parametrize("cased", [False, True], ids=["uncased", "cased"])
def test_transformers_tokenizes_as_our_records(cased, tmp_path):
    import transformers

    text = "The cats, didn't it?\t£3.50 au Café — in 東京! ÜBER-long naïve façade ☃ 𝔘"
    letters = sorted({*text, *text.lower()} - set("☃𝔘\t "))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "the", "cat", "Café", "cafe"]
    pieces = [*words, *letters, *(f"##{letter}" for letter in letters)]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    write_vocabulary(
        corpus, "".join(f"{piece}\n" for piece in pieces).encode(), Normalization(cased=cased)
    )
    shape = {**SHAPE, "vocab_size": len(pieces)}
    corpora = {"generated_dataset": False, "dataset_dir": str(corpus), "bert_config": shape}
    path = save(tmp_path / "run", *build(settings_of(**corpora))[1:])
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    # A BertTokenizer that is made wrongly has five pieces, and every word is unknown.
    assert theirs.get_vocab() == numbers
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert ids == Encoder(numbers, Normalization(cased=cased)).encode(text).tokens.tolist()
    assert len(set(ids)) > 20
