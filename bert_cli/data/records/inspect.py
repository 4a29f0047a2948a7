"""`bert inspect`: what is in a folder of records, as text and figures, and what of it will hurt.

It reads what a run would read: the first records in the order that a seed draws, which lie all over
the folder, so that 20,000 of them say in seconds what a pass over a billion would say in hours. What
the files themselves tell (records by shard, bytes) is of the whole folder. A figure that cannot be had
is said to be missing. `LIMITS` says where a figure becomes a warning.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bert_cli import terminal
from bert_cli.config.settings import is_remote, is_set
from bert_cli.config.tools import InspectSettings
from bert_cli.data.records.statistics import Batch, Tally, labels_of, unmasked, words_of
from bert_cli.data.records.vocab import VOCAB_FILE, Vocabulary, read_vocabulary
from bert_cli.data.shards.manifest import MANIFEST, read_manifest
from bert_cli.data.stream.permutation import record_at
from bert_cli.data.stream.reader import BLOCK, Reader
from bert_cli.data.stream.remote import local_copy
from bert_cli.errors import ConfigError, DataError
from bert_cli.files import format_bytes, is_stdout, output_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Figure -> the least and the most that is left unsaid. English text under BERT's own vocabulary has
# 1.1 pieces a word, 0.0005 % unknown tokens and, made five times over, 0.02 equals of an example.
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
# What a share is of -> how many there must be of it before the share is more than chance.
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


class Hurt(NamedTuple):
    """Something that will hurt a training."""

    what: str
    number: float
    remedy: str


def run(settings: InspectSettings) -> None:
    """Print examples, figures and warnings of a folder of records; write them where --json says.

    Raises DataError for records that cannot be read, ConfigError for a setting without effect.
    """
    reader, vocabulary = _open(settings)
    number = min(settings.sample, len(reader))
    tally = Tally(words_of(vocabulary.pieces, vocabulary.special))
    for first in range(0, number, BLOCK):
        tally.add(reader.rows(np.arange(first, min(number, first + BLOCK))))
    figures = _of_the_folder(settings.folder, reader) | tally.figures(len(reader))
    hurts = list(what_hurts(figures))
    if settings.json_file is not None:
        told: dict[str, Any] = figures | {
            "sample": number,
            "seed": settings.seed,
            "lengths": {str(length): tally.lengths[length] for length in sorted(tally.lengths)},
            "warnings": [hurt._asdict() for hurt in hurts],
        }
        output_json(settings.json_file, told)
        if is_stdout(settings.json_file):
            return
    console = terminal.console()
    say = partial(console.print, soft_wrap=True)
    say(_heading(settings, figures, number))
    if settings.examples:
        _show_examples(console, reader, vocabulary, min(settings.examples, len(reader)))
    say("\nlengths of sequences, in tokens with [CLS] and [SEP]")
    for line in histogram(tally.lengths, reader.sequence_length):
        say(line)
    say("\nfigures")
    for line in table(figures):
        say(line)
    say("\nwarnings" if hurts else "\nno warnings")
    for hurt in hurts:
        say(f"  {settings.folder}: {hurt.what}; {hurt.remedy}")


def _open(settings: InspectSettings) -> tuple[Reader, Vocabulary]:
    folder = Path(settings.folder)
    if is_remote(settings.folder):
        folder = local_copy(settings.folder, settings.dataset_cache.expanduser())
    reader = Reader(
        folder,
        seed=settings.seed,
        examples_per_step=1,
        micro_batch_size=1,
        masking=settings.masking,
    )
    if not len(reader):
        raise DataError(f"folder ({settings.folder}): holds no records; rebuild it")
    if not reader.is_dynamic and is_set(settings, "masking"):
        raise ConfigError(
            f"masking: has no effect on {settings.folder}, whose records are static and masked already; "
            "leave it out"
        )
    vocabulary = read_vocabulary(folder / VOCAB_FILE)
    if vocabulary.sha256 != reader.corpus["vocab_sha256"]:
        raise DataError(
            f"{vocabulary.path}: is not the vocabulary that the records were made with; bring it back"
        )
    return reader, vocabulary


def _of_the_folder(name: str, reader: Reader) -> dict[str, Any]:
    """Figures of all records, from corpus.json and the manifest of the step that made them."""
    corpus = reader.corpus
    files = corpus["files"]
    size = sum(file["bytes"] for file in files)
    return {
        "folder": name,
        "format": corpus["format"],
        "records": len(reader),
        "sequence_length": reader.sequence_length,
        "max_sequences_per_pack": corpus.get("max_sequences_per_pack", 1),
        "vocab_size": corpus["vocab_size"],
        "bytes": size,
        "bytes_per_record": size / len(reader),
        "files": len(files),
        "largest_shard_share": max(file["records"] for file in files) / len(reader),
        "copies": copies_of(reader.folder, corpus),
    }


def copies_of(folder: Path, corpus: Mapping[str, Any]) -> int | None:
    """How often the text was gone through for static records; None where nobody says."""
    if corpus["format"] != "static":
        return None
    copies = corpus.get("duplication_factor")
    if copies is None and (folder / MANIFEST).is_file():
        copies = read_manifest(folder).get("settings", {}).get("duplication_factor")
    return copies if isinstance(copies, int) else None


# --- warnings


def what_hurts(figures: Mapping[str, Any]) -> Iterator[Hurt]:
    """What of the figures will hurt a training, each with its number and what to do."""
    remedies = _remedies(figures)
    for name, (least, most) in LIMITS.items():
        value = figures[name]
        counted, enough = ENOUGH.get(name, ("records", 1))
        if name == "random_next_share" and figures[counted]:
            # Of few pairs another share is chance: three standard deviations of a half.
            chance = 1.5 / math.sqrt(figures[counted])
            least, most = min(least, 0.5 - chance), max(most, 0.5 + chance)
        if name == "equals_per_example" and not figures["next_sentence_labels"]:
            # Without pairs every copy of the text has the same sequences, with other masks.
            most += (figures["copies"] or 1) - 1
        if value is None or figures[counted] < enough or least <= value <= most:
            continue
        if name == "largest_shard_share" and figures["files"] == 1:
            continue
        what, remedy = remedies[name]
        yield Hurt(what, value, remedy)
    if figures["predictions"] == 0:
        yield Hurt("no token is masked (0 predictions)", 0, "make the records again with masks")
    if figures["copies"] == 1:
        yield Hurt(
            "static records of one copy (duplication_factor 1): every epoch has the same masks",
            1,
            "make them with --masking dynamic, which draws new ones each epoch, or with "
            "--duplication-factor 5",
        )


def _remedies(figures: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """What is said of each figure beyond its limits, and what to do."""
    value = {name: figures[name] or 0.0 for name in LIMITS}
    share, dynamic = value["masked_share_of_tokens"], figures["format"] == "dynamic"
    cut = (figures["examples_with_all_predictions"] or 0.0) > 0.5
    if share < 0.15 and cut:
        more = "max_predictions_per_seq" if dynamic else "--mask-tokens in `bert tokenize`"
        masks = f"most examples have all the masks they may have; raise {more}"
    elif dynamic:
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
            "remove what is there twice: `bert preprocess --deduplicate`",
        ),
        "largest_shard_share": (
            f"{value['largest_shard_share']:.0%} of the records are in one shard of {figures['files']}",
            "only there are its texts paired, and one process makes it alone; cut its input into files of like size",
        ),
        "masked_share_of_tokens": (f"{share:.1%} of the tokens are to be predicted", masks),
        "masks_shown_as_mask": (
            f"{value['masks_shown_as_mask']:.1%} of what is to be predicted is shown as [MASK], not 80 %",
            "the records are of another recipe; make them with `bert tokenize`",
        ),
        "random_next_share": (
            f"{value['random_next_share']:.1%} of the pairs are random ones, not half",
            "documents of one sentence, and sentences longer than an example, have no next one: see that "
            "`bert preprocess` has split the text, keep the paragraphs of a file together with its --documents files "
            "where a blank line stands between them, join short documents, or do without pairs",
        ),
        "real_token_share": (
            f"{1 - value['real_token_share']:.1%} of the places are padding",
            "pack several sequences into an example with `bert pack`, or choose a shorter --sequence-length"
            if figures["max_sequences_per_pack"] == 1
            else "pack more of them into an example with --max-sequences-per-pack",
        ),
    }


# --- figures as lines


def _heading(settings: InspectSettings, figures: Mapping[str, Any], number: int) -> str:
    records, files = figures["records"], figures["files"]
    read = "all of them" if number == records else f"a sample of {number:,}, drawn all over it"
    return (
        f"{settings.folder}: {records:,} {figures['format']} records of {figures['sequence_length']} places in "
        f"{files:,} file{'' if files == 1 else 's'}, {format_bytes(figures['bytes'])}, vocabulary of "
        f"{figures['vocab_size']:,} words\nread: {read} (seed {settings.seed})"
    )


def table(figures: Mapping[str, Any]) -> list[str]:
    """The figures in words, a line each; `-` for one that cannot be had."""

    def percent(name: str) -> str:
        return "-" if figures[name] is None else f"{100 * figures[name]:.3g}%"

    def number(name: str) -> str:
        return "-" if figures[name] is None else f"{figures[name]:,.2f}"

    pairs = percent("random_next_share") if figures["next_sentence_labels"] else "no pairs"
    masks = ("masks_shown_as_mask", "masks_shown_as_another_word", "masks_shown_as_they_are")
    rows = [
        ("bytes of a record", number("bytes_per_record")),
        ("records in the largest shard", percent("largest_shard_share")),
        ("copies of the text", "-" if figures["copies"] is None else str(figures["copies"])),
        ("places that are no padding", percent("real_token_share")),
        ("tokens of a sequence", number("tokens_per_sequence")),
        ("sequences of an example", number("sequences_per_example")),
        ("tokens to be predicted", percent("masked_share_of_tokens")),
        ("  shown as [MASK], another word, themselves", ", ".join(map(percent, masks))),
        ("random next sentences", pairs),
        ("unknown tokens", percent("unknown_share_of_tokens")),
        ("pieces of a word, punctuation apart", number("pieces_per_word")),
        ("sequences whose text was read before", f"{figures['repeated_texts']:,}"),
        ("  with the same masks, too", f"{figures['repeated_texts_with_their_masks']:,}"),
        ("others with the text of an example, on average", number("equals_per_example")),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {told}" for name, told in rows]


def histogram(lengths: Counter[int], longest: int) -> list[str]:
    """Lengths up to `longest` in at most BARS ranges, a line each."""
    step = -(-longest // BARS)
    ranges = [(first, min(longest, first + step - 1)) for first in range(1, longest + 1, step)]
    counts = [sum(lengths[n] for n in range(first, last + 1)) for first, last in ranges]
    most, width = max(counts), len(f"{max(counts):,}")
    digits = len(str(longest))
    lines = []
    for (first, last), count in zip(ranges, counts, strict=True):
        bar = "#" * -(-BAR_WIDTH * count // most) if most else ""
        lines.append(f"  {first:>{digits}} - {last:>{digits}}  {count:>{width},}  {bar}".rstrip())
    return lines


# --- examples as text


def _show_examples(console: "Console", reader: Reader, vocabulary: Vocabulary, number: int) -> None:
    batch = reader.rows(np.arange(number))
    _, records = record_at(np.arange(number), len(reader), reader.seed)
    files = reader.corpus["files"]
    ends = np.cumsum([file["records"] for file in files])
    console.print(
        "\nto be predicted: {word -> [MASK]}, {word -> another one} and, shown as it is, {word}",
        soft_wrap=True,
    )
    for row, record in enumerate(records.tolist()):
        name = files[int(np.searchsorted(ends, record, side="right"))]["name"]
        console.print(f"\nexample {row + 1}: record {record:,}, in {name}")
        for lead, text in told(batch, row, vocabulary):
            for place, line in enumerate(text.wrap(console, console.width - 6)):
                line.rstrip()
                console.print(f"  {lead if place == 0 else '':<3} ", line, sep="")


def told(batch: Batch, row: int, vocabulary: Vocabulary) -> Iterator[tuple[str, "Text"]]:
    """An example as lines of text with what each is: A and B of a pair, sequence after sequence."""
    from rich.text import Text

    sequence_S, segments_S = batch["input_mask"][row], batch["segment_ids"][row]
    labels_BC, counts_BC = labels_of(batch)
    original_S, read_S = unmasked(batch)[row], batch["input_ids"][row]
    chosen = batch["masked_lm_positions"][row][batch["masked_lm_weights"][row] > 0].tolist()
    most = int(sequence_S.max(initial=0))
    for number in range(1, most + 1):
        places = np.flatnonzero(sequence_S == number).tolist()
        inside = set(chosen) & set(places)
        about = f"{len(places)} tokens, {len(inside)} to be predicted"
        if counts_BC[row, number - 1]:
            about += f", B is {'a random' if labels_BC[row, number - 1] else 'the actual'} next"
        yield "", Text(about if most == 1 else f"sequence {number}: {about}")
        for segment, name in ((0, "A"), (1, "B")):
            here = [place for place in places if segments_S[place] == segment]
            if here:
                yield name, marked(here, original_S, read_S, inside, vocabulary)


def marked(
    places: list[int], original_S: Any, read_S: Any, chosen: set[int], vocabulary: Vocabulary
) -> "Text":
    """The tokens at some places as text, pieces of a word together, what is to be predicted in braces."""
    from rich.text import Text

    special, text = vocabulary.special, Text()
    for place in places:
        number, shown = int(original_S[place]), int(read_S[place])
        if number in (special.cls, special.sep):
            continue
        piece, is_first = _readable(vocabulary.pieces[number]), not text.plain
        follows = piece.startswith("##") and not is_first
        text.append("" if follows or is_first else " ")
        if place not in chosen:
            text.append(piece[2:] if follows else piece)
        elif shown == number:
            text.append(f"{{{piece}}}", MASK_STYLE)
        else:
            text.append(f"{{{piece} -> {_readable(vocabulary.pieces[shown])}}}", MASK_STYLE)
    return text


def _readable(piece: str) -> str:
    """A piece as the terminal can show it: what it cannot is a question mark."""
    seen = "".join(letter if letter.isprintable() else "?" for letter in piece)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return seen.encode(encoding, "replace").decode(encoding)
