"""`bert inspect`: examples, statistics and warnings of a folder of records.

It reads what a run would read: the first records in the order of a seed. They are spread over the folder, so 20,000 of
them show in seconds what a pass over a billion would show in hours. Records by file and bytes are those of the complete
folder. `LIMITS` says where a statistic becomes a warning.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert_cli import processes
from bert_cli.config.settings import is_remote, is_set
from bert_cli.config.tools import InspectSettings
from bert_cli.data.records.statistics import Batch, SampleStatistics, labels_of, unmasked
from bert_cli.data.records.vocab import VOCAB_FILE, Vocabulary, read_vocabulary
from bert_cli.data.shards.manifest import MANIFEST, read_manifest
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.reader import BLOCK, shuffled
from bert_cli.data.stream.remote import local_copy
from bert_cli.data.stream.source import Records
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import format_bytes, is_stdout, output_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Statistic -> the least and most without a warning. English text under BERT's own vocabulary has 1.1 pieces a word,
# 0.0005 % unknown tokens and, of five copies, 0.02 duplicates of an example.
LIMITS: dict[str, tuple[float, float]] = {
    "pieces_per_word": (0.0, 2.5),
    "unknown_share_of_tokens": (0.0, 0.01),
    "equals_per_example": (0.0, 0.1),
    "largest_shard_share": (0.0, 0.75),
    "masked_share_of_tokens": (0.1, 0.2),
    "masks_shown_as_mask": (0.75, 0.85),
    "random_next_share": (0.4, 0.6),
    "real_token_share": (0.5, 1.0),
}
# Statistic -> its denominator and how large that must be before a deviation is more than chance.
ENOUGH = {
    "masked_share_of_tokens": ("tokens", 1000),
    "masks_shown_as_mask": ("predictions", 1000),
    "random_next_share": ("next_sentence_labels", 20),
    "unknown_share_of_tokens": ("tokens", 1000),
    "pieces_per_word": ("tokens", 1000),
    "equals_per_example": ("equal_pairs", 5),
}
BARS, BAR_WIDTH = 16, 50
MASK_STYLE = "yellow"


class Finding(NamedTuple):
    """A property of the records that is bad for training."""

    what: str
    number: float
    remedy: str


def run(settings: InspectSettings) -> None:
    """Print examples, statistics and warnings of a folder of records; write them where --json says.

    DataError for records that cannot be read, ConfigError for a setting without effect.
    """
    source, vocabulary = _open(settings)
    number = min(settings.sample, len(source))
    sample = SampleStatistics(vocabulary)
    for first in range(0, number, BLOCK):
        sample.add(shuffled(source, np.arange(first, min(number, first + BLOCK))))
    report = _folder_report(settings.folder, source) | sample.report(len(source))
    warnings = list(find_warnings(report))
    if settings.json_file is not None:
        lengths = {str(length): sample.lengths[length] for length in sorted(sample.lengths)}
        of_sample = {"sample": number, "seed": settings.seed, "lengths": lengths}
        of_sample["warnings"] = [warning._asdict() for warning in warnings]
        output_json(settings.json_file, report | of_sample)
        if is_stdout(settings.json_file):
            return
    console = processes.console()
    print_line = partial(console.print, soft_wrap=True)
    print_line(_heading(settings, report, number))
    if settings.examples:
        _print_examples(console, source, vocabulary, min(settings.examples, len(source)))
    print_line("\nlengths of sequences, in tokens with [CLS] and [SEP]")
    for line in (
        *histogram(sample.lengths, source.sequence_length),
        "\nstatistics",
        *table(report),
    ):
        print_line(line)
    print_line("\nwarnings" if warnings else "\nno warnings")
    for warning in warnings:
        print_line(f"  {settings.folder}: {warning.what}; {warning.remedy}")


def _open(settings: InspectSettings) -> tuple[Records, Vocabulary]:
    folder = Path(settings.folder)
    if is_remote(settings.folder):
        folder = local_copy(settings.folder, settings.dataset_cache.expanduser())
    source = Records(folder, seed=settings.seed, masking=settings.masking)
    if not len(source):
        raise DataError(f"folder ({settings.folder})", "holds no records", "rebuild it")
    if not source.is_dynamic and is_set(settings, "masking"):
        raise ConfigError(
            "masking",
            f"has no effect on {settings.folder}, whose records are static and masked already",
            "leave it out",
        )
    vocabulary = read_vocabulary(folder / VOCAB_FILE)
    if vocabulary.sha256 != source.corpus["vocab_sha256"]:
        raise DataError(
            str(vocabulary.path),
            "is not the vocabulary that the records were made with",
            "bring it back",
        )
    return source, vocabulary


def _folder_report(name: str, source: Records) -> dict[str, Any]:
    """Return the statistics of all records, from corpus.json and the manifest."""
    corpus = source.corpus
    size = sum(file["bytes"] for file in corpus["files"])
    return {
        "folder": name,
        "format": corpus["format"],
        "records": len(source),
        "sequence_length": source.sequence_length,
        "max_sequences_per_pack": corpus.get("max_sequences_per_pack", 1),
        "vocab_size": corpus["vocab_size"],
        "bytes": size,
        "bytes_per_record": size / len(source),
        "files": len(corpus["files"]),
        "largest_shard_share": max(file["records"] for file in corpus["files"]) / len(source),
        "copies": number_of_copies(source.folder, corpus),
    }


def number_of_copies(folder: Path, corpus: Mapping[str, Any]) -> int | None:
    """Return the duplication factor of static records; None where it is not recorded."""
    if corpus["format"] != "static":
        return None
    copies = corpus.get("duplication_factor")
    if copies is None and (folder / MANIFEST).is_file():
        copies = read_manifest(folder).get("settings", {}).get("duplication_factor")
    return copies if isinstance(copies, int) else None


# --- warnings


def find_warnings(report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is bad for training, with its number and a remedy."""
    messages = _messages(report)
    for name, (least, most) in LIMITS.items():
        value = report[name]
        denominator, enough = ENOUGH.get(name, ("records", 1))
        if name == "random_next_share" and report[denominator]:
            # Few pairs deviate by chance: three standard deviations of a half.
            chance = 1.5 / math.sqrt(report[denominator])
            least, most = min(least, 0.5 - chance), max(most, 0.5 + chance)
        if name == "equals_per_example" and not report["next_sentence_labels"]:
            # Without pairs every copy of the text has the same sequences, with other masks.
            most += (report["copies"] or 1) - 1
        if value is None or report[denominator] < enough or least <= value <= most:
            continue
        if name == "largest_shard_share" and report["files"] == 1:
            continue
        what, remedy = messages[name]
        yield Finding(what, value, remedy)
    if report["predictions"] == 0:
        yield Finding("no token is masked (0 predictions)", 0, "make the records again with masks")
    if report["copies"] == 1:
        yield Finding(
            "static records of one copy (duplication_factor 1): every epoch has the same masks",
            1,
            "make them with --masking dynamic, which draws new ones each epoch, or with "
            "--duplication-factor 5",
        )


def _messages(report: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return problem and remedy of each statistic beyond its limits."""
    value = {name: report[name] or 0.0 for name in LIMITS}
    masked, is_dynamic = value["masked_share_of_tokens"], report["format"] == "dynamic"
    if masked < 0.15 and (report["examples_with_all_predictions"] or 0.0) > 0.5:
        setting = "max_predictions_per_seq" if is_dynamic else "--mask-tokens in `bert tokenize`"
        masks = f"most examples have all the masks they may have; raise {setting}"
    elif is_dynamic:
        masks = "give --masking.probability 0.15, to the run too"
    else:
        masks = "make the records again with --masked-lm-prob 0.15"
    return {
        "pieces_per_word": (
            f"words are split into {value['pieces_per_word']:.2f} pieces on average",
            "the vocabulary is not this text's: train one with `bert vocab`, or take one of its language",
        ),
        "unknown_share_of_tokens": (
            f"{value['unknown_share_of_tokens']:.1%} of the tokens are [UNK]",
            "the vocabulary lacks letters of this text: train one with `bert vocab`, or take one of its language",
        ),
        "equals_per_example": (
            f"the text of an example is {value['equals_per_example']:.2f} times more in the folder, on average",
            "remove duplicate text: `bert preprocess --deduplicate`",
        ),
        "largest_shard_share": (
            f"{value['largest_shard_share']:.0%} of the records are in one shard of {report['files']}",
            "its texts are paired only with each other, and one process makes it alone; cut its input into files of "
            "similar size",
        ),
        "masked_share_of_tokens": (f"{masked:.1%} of the tokens are predicted", masks),
        "masks_shown_as_mask": (
            f"{value['masks_shown_as_mask']:.1%} of the predicted tokens are shown as [MASK], not 80 %",
            "the records are of another recipe; make them with `bert tokenize`",
        ),
        "random_next_share": (
            f"{value['random_next_share']:.1%} of the pairs are random ones, not half",
            "documents of one sentence, and sentences longer than an example, have no next one: split the text with "
            "`bert preprocess`, use --documents files where blank lines separate the paragraphs of a file, join short "
            "documents, or do without pairs",
        ),
        "real_token_share": (
            f"{1 - value['real_token_share']:.1%} of the positions are padding",
            "pack several sequences into an example with `bert pack`, or choose a shorter --sequence-length"
            if report["max_sequences_per_pack"] == 1
            else "pack more of them into an example with --max-sequences-per-pack",
        ),
    }


# --- statistics as lines


def _heading(settings: InspectSettings, report: Mapping[str, Any], number: int) -> str:
    records, files = report["records"], report["files"]
    read = (
        "all of them"
        if number == records
        else f"a sample of {number:,}, drawn from the complete folder"
    )
    return (
        f"{settings.folder}: {records:,} {report['format']} records of {report['sequence_length']} positions in "
        f"{files:,} file{'' if files == 1 else 's'}, {format_bytes(report['bytes'])}, vocabulary of "
        f"{report['vocab_size']:,} tokens\nread: {read} (seed {settings.seed})"
    )


def table(report: Mapping[str, Any]) -> list[str]:
    """Return the statistics in words, a line each; `-` for an unknown one."""

    def percent(name: str) -> str:
        return "-" if report[name] is None else f"{100 * report[name]:.3g}%"

    def number(name: str) -> str:
        return "-" if report[name] is None else f"{report[name]:,.2f}"

    pairs = percent("random_next_share") if report["next_sentence_labels"] else "no pairs"
    masks = ("masks_shown_as_mask", "masks_shown_as_another_word", "masks_shown_as_they_are")
    rows = [
        ("bytes per record", number("bytes_per_record")),
        ("records in the largest shard", percent("largest_shard_share")),
        ("copies of the text", "-" if report["copies"] is None else str(report["copies"])),
        ("positions that are not padding", percent("real_token_share")),
        ("tokens per sequence", number("tokens_per_sequence")),
        ("sequences per example", number("sequences_per_example")),
        ("predicted tokens", percent("masked_share_of_tokens")),
        ("  shown as [MASK], another token, themselves", ", ".join(map(percent, masks))),
        ("random next sentences", pairs),
        ("unknown tokens", percent("unknown_share_of_tokens")),
        ("pieces per word, without punctuation", number("pieces_per_word")),
        ("sequences with the text of an earlier one", f"{report['repeated_texts']:,}"),
        ("  with the same masks, too", f"{report['repeated_texts_with_their_masks']:,}"),
        ("duplicates of an example's text, on average", number("equals_per_example")),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def histogram(lengths: Counter[int], longest: int) -> list[str]:
    """Return lengths up to `longest` in at most BARS ranges, a line each."""
    step = -(-longest // BARS)
    ranges = [(first, min(longest, first + step - 1)) for first in range(1, longest + 1, step)]
    counts = [sum(lengths[n] for n in range(first, last + 1)) for first, last in ranges]
    most, width, digits = max(counts), len(f"{max(counts):,}"), len(str(longest))
    lines = []
    for (first, last), count in zip(ranges, counts, strict=True):
        bar = "#" * -(-BAR_WIDTH * count // most) if most else ""
        lines.append(f"  {first:>{digits}} - {last:>{digits}}  {count:>{width},}  {bar}".rstrip())
    return lines


# --- examples as text


def _print_examples(
    console: "Console", source: Records, vocabulary: Vocabulary, number: int
) -> None:
    batch = shuffled(source, np.arange(number))
    _, records = record_at(np.arange(number), len(source), source.seed)
    files = source.corpus["files"]
    ends = np.cumsum([file["records"] for file in files])
    console.print(
        "\npredicted tokens: {word -> [MASK]}, {word -> another one} and, shown unchanged, {word}",
        soft_wrap=True,
    )
    for row, record in enumerate(records.tolist()):
        name = files[int(np.searchsorted(ends, record, side="right"))]["name"]
        console.print(f"\nexample {row + 1}: record {record:,}, in {name}")
        for label, text in describe_example(batch, row, vocabulary):
            for number_of_line, line in enumerate(text.wrap(console, console.width - 6)):
                line.rstrip()
                console.print(f"  {'' if number_of_line else label:<3} ", line, sep="")


def describe_example(
    batch: Batch, row: int, vocabulary: Vocabulary
) -> Iterator[tuple[str, "Text"]]:
    """Yield an example as labelled lines of text: A and B of a pair, sequence after sequence."""
    from rich.text import Text

    sequence_S, segments_S = batch["input_mask"][row], batch["segment_ids"][row]
    labels_BC, counts_BC = labels_of(batch)
    tokens_S, shown_S = unmasked(batch)[row], batch["input_ids"][row]
    masked = batch["masked_lm_positions"][row][batch["masked_lm_weights"][row] > 0].tolist()
    sequences = int(sequence_S.max(initial=0))
    for number in range(1, sequences + 1):
        positions = np.flatnonzero(sequence_S == number).tolist()
        predicted = set(masked) & set(positions)
        about = f"{len(positions)} tokens, {len(predicted)} predicted"
        if counts_BC[row, number - 1]:
            about += f", B is {'a random' if labels_BC[row, number - 1] else 'the actual'} next"
        yield "", Text(about if sequences == 1 else f"sequence {number}: {about}")
        for segment, name in ((0, "A"), (1, "B")):
            of_segment = [position for position in positions if segments_S[position] == segment]
            if of_segment:
                yield name, mark_masks(of_segment, tokens_S, shown_S, predicted, vocabulary)


def mark_masks(
    positions: list[int], tokens_S: Any, shown_S: Any, predicted: set[int], vocabulary: Vocabulary
) -> "Text":
    """Return the tokens at some positions as text, with the pieces of a word joined and predictions in braces."""
    from rich.text import Text

    special, text = vocabulary.special, Text()
    for position in positions:
        token, shown = int(tokens_S[position]), int(shown_S[position])
        if token in (special.cls, special.sep):
            continue
        piece, is_first = _printable(vocabulary.pieces[token]), not text.plain
        continues = piece.startswith("##") and not is_first
        text.append("" if continues or is_first else " ")
        if position not in predicted:
            text.append(piece[2:] if continues else piece)
        elif shown == token:
            text.append(f"{{{piece}}}", MASK_STYLE)
        else:
            text.append(f"{{{piece} -> {_printable(vocabulary.pieces[shown])}}}", MASK_STYLE)
    return text


def _printable(piece: str) -> str:
    """Return a piece with a question mark for every letter that the terminal cannot show."""
    text = "".join(letter if letter.isprintable() else "?" for letter in piece)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)
