"""`bert vocab`: a vocabulary from sentences."""

from functools import partial
from pathlib import Path

from bert_cli.config.data import VocabSettings
from bert_cli.data.io.inputs import LeftOut, open_sentences
from bert_cli.data.io.manifest import Step, shard_of
from bert_cli.data.tokens import vocab
from bert_cli.data.tokens.notation import BYTE_LEVEL, WORDPIECE
from bert_cli.data.tokens.tokenizer import VOCAB_FILE, Normalization
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.errors import ConfigError
from bert_cli.processes import print_line
from bert_cli.settings.markers import recorded


def run(settings: VocabSettings) -> None:
    """Train a WordPiece vocabulary (Schuster and Nakajima 2012); the same text gives the same vocabulary."""
    size = int(settings.size)
    values = recorded(settings)
    base = None
    if settings.extend is None:
        normalization = Normalization(
            settings.cased, settings.strip_accents, settings.split_chinese
        )
        values |= normalization.changes()
    else:
        base = vocab.find_vocabulary(settings.extend, cased=settings.cased)
        if base.notation is BYTE_LEVEL:
            problem = f"is {BYTE_LEVEL.name}, and only {WORDPIECE.name} can be extended"
            raise ConfigError(f"extend ({settings.extend})", problem, "use the vocabulary as it is")
        names = {"strip_accents", "split_chinese"} & settings.model_fields_set
        changes = settings.model_dump(include=names, exclude_none=True)
        normalization = vocab.normalization_to_extend(base, settings.extend, changes)
        values |= normalization.changes() | {"extends": base.sha256}
    left_out = LeftOut("vocab", [settings.input], strict=False)
    text = open_sentences(settings.input, settings.out, left_out)
    step = Step("vocab", settings.out, values, ["tokenizers"], counted="sentences")
    shard = shard_of(Path(VOCAB_FILE), text.parts)
    make = partial(vocab.convert, size=size, normalization=normalization, base=base)
    record = run_shards(step, [shard], make, Workers(), notes=text.notes)
    pieces = record["counts"]["pieces"]
    new = pieces
    kind = "pieces"
    described = f"{pieces:,} pieces"
    if base:
        new -= len(base.pieces)
        kind = "new pieces"
        described += f", {new:,} of them new"
    print_line(f"vocab: {described}")
    if new < size:
        print_line(
            f"vocab: only {new:,} {kind} occur {vocab.MIN_FREQUENCY} times or more in "
            f"this text, fewer than the {size:,} of --size"
        )
