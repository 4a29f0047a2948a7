"""`bert verdict`: judge the model of a folder of `bert init` against its start.

The documents of the test neither trained nor chose anything. The verdict is WIN or REGRESSION where the interval of the
paired difference over documents does not contain 0.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from keras import ops
from scipy.special import logsumexp

from bert_cli.config.init import VerdictSettings
from bert_cli.data.finetune.features import encode_texts
from bert_cli.data.finetune.tables import table_rows
from bert_cli.data.random import row_keys
from bert_cli.data.records.masking import MaskRecipe, mask_examples
from bert_cli.data.text.download import sample_dump
from bert_cli.data.text.wikitext import site_of, to_lines
from bert_cli.data.tokens.tokenizer import read_vocabulary, vocabulary_path
from bert_cli.errors import CheckpointError, DataError
from bert_cli.facts.masking import Masking
from bert_cli.files import JSONObject, read_json, write_output
from bert_cli.processes import print_line, print_table
from bert_cli.statistics import Sample, Score, difference, identify, sample_of
from bert_cli.tasks.look.plot import render
from bert_cli.tasks.model import models, opened
from bert_cli.tasks.run.task import Result
from bert_cli.train.checkpoint import Folder
from bert_cli.train.scores import read_samples

MIN_DOCUMENTS = 6  # five are all better by chance in 3 of 100 cases
EXAMPLES = 500  # of a text, of which tokens are masked
# The scores of 32 examples of 128 positions with 20 masks and 30,522 tokens take 78 MB.
AT_ONCE = 32
TEMPLATE = Path(__file__).with_name("page.html")
TEST = "text/test.jsonl"


class Measure(NamedTuple):
    """A score of the start and of the trained model, and how much better the trained model is."""

    name: str
    start: float
    trained: float
    gain: Score

    @property
    def verdict(self) -> str:
        """Return WIN, NO DIFFERENCE or REGRESSION."""
        if self.gain.groups < MIN_DOCUMENTS or self.gain.low <= 0 <= self.gain.high:
            return "NO DIFFERENCE"
        if self.gain.low > 0:
            return "WIN"
        return "REGRESSION"


def run(settings: VerdictSettings) -> None:
    """Print the verdict and write the report.

    Raises DataError for a folder without a test, CheckpointError without a trained model.
    """
    out = settings.out
    if not (out / TEST).is_file():
        remedy = "use a folder of `bert init` without --for search, which trains nothing"
        raise DataError(f"out ({out})", f"has no {TEST}", remedy)
    trained = out / "run"
    if Folder(trained).newest is None:
        raise CheckpointError(
            str(trained), "has no trained model", f"run `bash {out / 'commands.sh'}`"
        )
    measures = [*_of_labels(out), *_of_masked_lm(out)]
    first = measures[0]
    notes = []
    if first.gain.groups < MIN_DOCUMENTS:
        notes.append(f"fewer than {MIN_DOCUMENTS} documents show no difference; use more text")
    rows = []
    for m in measures:
        numbers = f"{m.start:.3f}", f"{m.trained:.3f}", f"{m.gain:+.3f}", f"{m.gain.groups:,}"
        rows.append((m.name, *numbers, m.verdict))
    heads = ("measure", "start", "trained", "gain [95 % interval]", "documents", "verdict")
    print_table(heads, rows, right=(1, 2, 4))
    print_line("\n".join([*notes, f"{first.verdict}: gain {first.gain:+.3f}, {first.name}"]))
    page = render(TEMPLATE, folder=out, measures=measures, notes=notes)
    write_output(out / "report.html", page, "out")


def _measure(name: str, start: Sample, trained: Sample, *, is_low: bool = False) -> Measure:
    """Return the measure of two samples of the same examples; `is_low` says that a lower score is better."""
    # A gain is positive where the trained model is better.
    if is_low:
        gain = difference([start], [trained])
    else:
        gain = difference([trained], [start])
    return Measure(name, start.value, trained.value, gain)


def _of_labels(out: Path) -> Iterator[Measure]:
    """Yield the accuracy of a classifier and of each baseline of its run, first the best on the half that chooses."""
    trained = read_samples(out / "classifier").get("accuracy")
    if trained is None:
        return
    starts = []
    for folder in (out / "classifier").glob("baselines_*/*"):
        complete = Result(read_samples(folder))
        choosing = complete.half(choosing=True).scores["accuracy"]
        for result in (complete, complete.half(choosing=False)):
            sample = result.samples["accuracy"]
            if sample.examples.digest == trained.examples.digest:
                starts.append((choosing, folder.name, sample))
    for _, name, start in sorted(starts, key=lambda start: -start[0]):
        yield _measure(f"accuracy (start: {name})", start, trained)


# --- masked LM


def _of_masked_lm(out: Path) -> Iterator[Measure]:
    """Yield the bits per byte of the test, and of other text; a model that fills no masks is no start."""
    remedy = "run `bert init` again, into a new folder"
    config = read_json(out / "pretrain.json", JSONObject, DataError, remedy)
    trained = models.find_source(str(out / "run"))
    name = config.get("pretrained_ckpt_path")
    start = None
    if name is not None:
        start = models.find_source(name)
        head = opened.head_of(start)
        if head is None or not head.fills_masks:
            start = None
    articles = sorted((sample_dump().parent / "articles").glob("*.wiki"))
    markup = (article.read_text(encoding="utf-8") for article in articles)
    samples = ["\n".join(to_lines(text, site_of(b""))) for text in markup]
    texts = {"your text": _texts(out, "test"), "other text (English articles)": samples}
    seen = []
    if start is None:
        texts = {"your text (start: frequencies of tokens)": texts["your text"]}
        seen = _texts(out, "train")
    for what, of_kind in texts.items():
        after = bits_per_byte(trained, of_kind, config["max_seq_length"])
        before = bits_per_byte(start or trained, of_kind, config["max_seq_length"], seen)
        yield _measure(f"bits per byte of {what}", before, after, is_low=True)


def bits_per_byte(
    source: models.Source, texts: Sequence[str], length: int, seen: Sequence[str] = ()
) -> Sample:
    """Return the bits per byte of the masked tokens of texts, each of which is a group.

    Models with the same vocabulary fill the same masks. With texts that were `seen`, the frequencies of their tokens
    fill them instead of the model.
    """
    # About 3 characters are a token: few examples are truncated.
    pieces: list[tuple[int, str]] = []
    for number, text in enumerate(texts):
        pieces += [(number, part) for part in textwrap.wrap(text, 3 * length)]
    owner, parts = zip(*pieces[:: math.ceil(len(pieces) / EXAMPLES)], strict=True)
    tokenizer = source.tokenizer.tokenizer
    features, _ = encode_texts(tokenizer, parts, None, {}, max_seq_length=length)
    tokens_BS = features.batch(np.arange(len(parts)), length)["input_ids"]
    masking = Masking()
    predictions = math.ceil(masking.probability * length)
    recipe = MaskRecipe(tokenizer.special, len(tokenizer.pieces), masking, predictions)
    sizes = features.lengths
    keys = row_keys(range(len(parts)), "bits per byte")
    columns = mask_examples(tokens_BS, sizes, sizes, np.zeros_like(sizes), keys, recipe)
    ids_BP = columns["masked_lm_ids"]
    if seen:
        tokens = encode_texts(tokenizer, seen, None, {}, max_seq_length=opened.UNLIMITED)[0].tokens
        # One more for each token, so that one that the text lacks has no infinite loss (Laplace).
        counts = 1 + np.bincount(tokens, minlength=len(tokenizer.pieces))
        nats_BP = -np.log(counts / counts.sum())[ids_BP]
    else:
        opened.one_device()
        model = opened.open_model(source, opened.task_of(source, "fill-mask"))
        batches = []
        for begin in range(0, len(ids_BP), AT_ONCE):
            batch = {name: column[begin : begin + AT_ONCE] for name, column in columns.items()}
            logits_BPV = ops.convert_to_numpy(model.logits(batch)[0])
            masked_BP1 = batch["masked_lm_ids"][:, :, None]
            of_ids_BP = np.take_along_axis(logits_BPV, masked_BP1, 2)[:, :, 0]
            batches.append(logsumexp(logits_BPV, axis=2) - of_ids_BP)
        nats_BP = np.concatenate(batches)
    bits_BP = columns["masked_lm_weights"] * nats_BP / math.log(2)
    bytes_BP = read_vocabulary(vocabulary_path(source.folder)).text_bytes[ids_BP]
    sums = (np.bincount(owner, of.sum(1), len(texts)) for of in (bits_BP, bytes_BP))
    return sample_of(identify(range(len(texts))), "ratio", *sums)


def _texts(out: Path, part: str) -> list[str]:
    return [row["text"] for _, row in table_rows(out / f"text/{part}.jsonl", (), Counter())]
