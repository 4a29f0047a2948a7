"""`bert tokenize`: records of masked pairs from sentences."""

from functools import partial
from typing import Literal

from bert_cli.config.data import TokenizeSettings
from bert_cli.data.io.inputs import open_sentences
from bert_cli.data.io.manifest import Step
from bert_cli.data.records import tokenize
from bert_cli.data.records.index import describe, write_corpus
from bert_cli.data.workers.runner import Workers, run_shards
from bert_cli.facts.masking import Masking
from bert_cli.processes import print_line
from bert_cli.settings.markers import recorded

# Fraction of truncated tokens above which a warning is printed. Of Wikipedia's sentences 24 % are at 64 positions.
MUCH_TRUNCATED = 0.4


def run(settings: TokenizeSettings) -> None:
    """Write OUT/wiki_000.tfrecord, ... with their indexes, the tokenizer's files and corpus.json."""
    vocabulary = tokenize.vocabulary_of(settings.vocab, cased=settings.cased, pairs=settings.nsp)
    values = {**recorded(settings), "vocab_sha256": vocabulary.sha256}
    masking = None
    if settings.masking == "static":
        unit: Literal["word", "token"] = "word" if settings.whole_word_masking else "token"
        masking = Masking(unit=unit, probability=settings.masked_lm_prob)
    copies = settings.duplication_factor if masking else 1
    recipe = tokenize.Recipe(
        vocabulary=(vocabulary.path.absolute(), vocabulary.sha256, vocabulary.normalization),
        sequence_length=settings.sequence_length,
        mask_tokens=settings.mask_tokens,
        masking=masking,
        copies=copies,
        has_pairs=settings.nsp,
        short_seq_prob=settings.short_seq_prob,
        seed=settings.random_seed,
    )
    values |= {"duplication_factor": recipe.copies, **vocabulary.normalization.changes()}
    text = open_sentences(settings.input, settings.out)
    shards, notes = tokenize.plan_groups(text, pairs=settings.nsp)
    step = Step(
        "tokenize",
        settings.out,
        settings=values,
        packages=("numpy", "tokenizers", "google-crc32c"),
        counted="records",
        expected_bytes=tokenize.bytes_written(text, recipe, len(vocabulary.pieces)),
    )
    workers = Workers(settings.processes, settings.scheduler)
    convert = partial(tokenize.convert, recipe=recipe)
    manifest = run_shards(step, shards, convert, workers, notes=notes)
    vocabulary.save(step.out)
    probability = masking.probability if masking else None
    whole_words = masking.unit == "word" if masking else None
    description = describe(
        vocabulary,
        masking=settings.masking,
        sequence_length=recipe.sequence_length,
        mask_tokens=recipe.mask_tokens,
        next_sentence=recipe.has_pairs,
        masked_lm_prob=probability,
        whole_word_masking=whole_words,
    )
    write_corpus(step.out, description)
    counts = manifest["counts"]
    truncated = counts["tokens_cut"] / max(1, counts["tokens"])
    if truncated > MUCH_TRUNCATED:
        print_line(
            f"tokenize: warning: {truncated:.0%} of the tokens of the pairs did not fit into "
            f"{recipe.sequence_length} positions and are lost: a pair has "
            f"{counts['tokens'] / counts['records']:.0f} tokens before truncation, because lines are long; if they "
            "have several sentences, run `bert preprocess` into another folder with "
            "--sentence-splitter sentencex and the --language of the text; or pass --no-nsp, which uses every token"
        )
