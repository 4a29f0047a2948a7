"""The examples of pre-training: one corpus or several, or synthetic.

Records that do not fit the run, or the model from which it starts, are refused before anything is built.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bert_cli.config.pretrain import PretrainSettings
from bert_cli.data.examples.reader import Batching, ExampleStream, shuffled
from bert_cli.data.examples.repeats import MAX_REPEATS, TEXT_SAMPLE, WITHOUT_COPIES, N, repeats
from bert_cli.data.examples.source import Records
from bert_cli.data.examples.synthetic import SyntheticStream
from bert_cli.data.records.corpus import RecordFiles, number_of_copies, read_corpus
from bert_cli.data.tokens.tokenizer import TokenizerFolder, has_tokenizer
from bert_cli.errors import ConfigError, DataError, logger
from bert_cli.facts.bert import BertConfig
from bert_cli.files import JSONObject
from bert_cli.parse.load import changed
from bert_cli.planning.checks import Check, of_vocabulary
from bert_cli.settings.settings import is_set
from bert_cli.text import count

if TYPE_CHECKING:
    from bert_cli.tasks.model.models import Source

Order = TypeVar("Order", bound=PretrainSettings)


def _on_disk(order: PretrainSettings) -> list[JSONObject]:
    """Return the corpus.json of each folder of the run, but not of absent or incomplete ones."""
    stored = []
    for path in () if order.generated_dataset else order.dataset_paths:
        with suppress(DataError):  # raised again when the folder is opened
            stored.append(read_corpus(Path(path)))
    return stored


def with_rows_for_records(order: Order, source: "Source | None" = None) -> Order:
    """Return the order with rows for the vocabulary of its records.

    Memory, layout and layers depend on the vocabulary. `source` is the model from which the run starts; a vocabulary
    with more pieces extends the model. Rows beyond the pieces of the records are padding; `source` may have such rows,
    and the settings of new weights. An absent or incomplete folder is refused when it is opened.
    """
    stored = _on_disk(order)
    model = order.bert_config
    if not stored:
        return order
    rows = model.vocab_size if is_set(model, "vocab_size") else 0
    rows = max(stored[0]["vocab_size"], source.config.vocab_size if source else rows)
    if rows == model.vocab_size:
        return order
    return changed(order, bert_config={"vocab_size": rows})


def note_vocabulary(configured: BertConfig, order: PretrainSettings) -> None:
    """Log rows of the word embeddings that differ from the settings or the vocabulary of the records."""
    before = configured.vocab_size
    rows = order.bert_config.vocab_size
    pieces = next((corpus["vocab_size"] for corpus in _on_disk(order)), rows)
    if rows != before:
        origin = "in the model"
        if rows == pieces:
            origin = "in the records"
        instead = ""
        if is_set(configured, "vocab_size"):
            instead = f", instead of {before:,}"
        logger.info(f"bert_config.vocab_size: {rows:,}, as {origin}{instead}")
    if rows > pieces:
        padding = f"{count(rows - pieces, 'row')} of the word embeddings"
        logger.info(
            f"bert_config.vocab_size: {rows:,}, and the records have {pieces:,} tokens; {padding} are padding"
        )


def open_stream(order: PretrainSettings, rank: int = 0, world_size: int = 1) -> ExampleStream:
    """Return the run's examples: the part of one process in each step. Raises ConfigError or DataError."""
    batch = order.global_batch
    batching = Batching(batch.examples, batch.micro_batch_size, rank, world_size)
    if order.generated_dataset:
        return synthetic(order, batching)
    if not order.corpora:
        remedy = "a folder of records made by `bert tokenize`, or --generated-dataset for synthetic examples"
        raise ConfigError("dataset_dir", "is missing", f"pass --dataset-dir, {remedy}")
    folders = [_folder_of(corpus.path, "dataset_dir") for corpus in order.corpora]
    sources = [_open_source(folder, order) for folder in folders]
    rows = order.bert_config.vocab_size
    for source in sources:
        if (pieces := source.corpus["vocab_size"]) > rows:
            problem = f"has a vocabulary of {pieces}, but the model's is {rows}"
            remedy = f"pass --bert-config.vocab-size {pieces}"
            raise ConfigError(f"dataset_dir ({source.folder})", problem, remedy)
    weights = [corpus.weight for corpus in order.corpora]
    stream = ExampleStream(sources, batching, weights, order.seed)
    if any(source.is_dynamic for source in stream.sources):
        return stream
    held_out = order.validation_dir and _folder_of(order.validation_dir, "validation_dir")
    # The masking may be meant for the evaluation alone, whose records choose masks when they are read.
    is_for_held_out = held_out and read_corpus(held_out)["masking"] == "dynamic"
    if order.mask_probabilities or (is_set(order, "masking") and not is_for_held_out):
        listed = ", ".join(map(str, folders))
        problem = f"has no effect on {listed}: static records are already masked"
        remedy = "leave it out, or make the records with --masking dynamic"
        raise ConfigError("masking", problem, remedy)
    return stream


def synthetic(order: PretrainSettings, batching: Batching) -> SyntheticStream:
    """Return synthetic examples in the shape of the run's."""
    return SyntheticStream(
        batching,
        seed=order.seed,
        vocab_size=order.bert_config.vocab_size,
        sequence_length=order.max_seq_length,
        predictions=order.max_predictions_per_seq,
        max_sequences_per_pack=order.max_sequences_per_pack,
        masking=order.masking,
    )


def text_checks(stream: ExampleStream, new_pieces: int | None) -> Iterator[Check]:
    """Yield checks, estimated from a sample: repeated text in each corpus, and the size of a new vocabulary.

    A pretrained model has learnt its vocabulary already: `new_pieces` is None.
    """
    tokens = 0.0
    for source in stream.sources if stream.folder is not None else ():
        # Static records repeat each pair with other masks; records of other tools do not say how often.
        copies = 1 if source.is_dynamic else number_of_copies(source.folder, source.corpus)
        if copies is None:
            continue
        rows = shuffled(source, np.arange(min(TEXT_SAMPLE, len(source))))
        often = repeats(rows, len(source))
        text = f"{source.folder}: a sequence of {N} tokens recurs {often:.2f} times on average"
        is_much = often > MAX_REPEATS * copies
        yield Check("repeated text", is_much, text, WITHOUT_COPIES, {"repeats": often})
        # Tokens of a record without padding, times records: the tokens of the text, once.
        mean = np.count_nonzero(rows["input_mask"]) / len(rows["input_mask"])
        tokens += mean * len(source) / copies
    if tokens and new_pieces is not None:
        yield of_vocabulary(new_pieces, tokens)


def open_held_out(order: PretrainSettings, name: str) -> ExampleStream | None:
    """Return the evaluation examples, if any; dynamic ones are packed like the run's.

    `name` is the setting that messages name.
    """
    if order.validation_dir is None:
        return None
    folder = _folder_of(order.validation_dir, name)
    size = order.global_batch.micro_batch_size
    corpus = read_corpus(folder)
    source = _open_source(folder, order, may_pack=corpus["masking"] == "dynamic")
    stored = _on_disk(order)
    trained = stored[0]["vocab_size"] if stored else order.bert_config.vocab_size
    pieces = corpus["vocab_size"]
    if pieces != trained:
        problem = f"has a vocabulary of {pieces}, but the run's records have {trained}"
        remedy = "make the held-out records with the vocabulary of dataset_dir"
        raise ConfigError(f"{name} ({folder})", problem, remedy)
    if corpus in stored:
        problem = "has the records that the run trains on, so its scores show memory, too"
        logger.warning(f"warning: {name} ({folder}): {problem}; use records of other text")
    return ExampleStream([source], Batching(size, size))


def _open_source(folder: Path, order: PretrainSettings, *, may_pack: bool = True) -> Records:
    """Open records, packed if the order says so."""
    return Records(
        RecordFiles(folder),
        seed=order.seed,
        sequence_length=order.max_seq_length,
        predictions=order.max_predictions_per_seq,
        masking=order.masking,
        max_sequences_per_pack=order.max_sequences_per_pack if may_pack else 1,
    )


def _folder_of(path: str, name: str) -> Path:
    """Return a folder that exists; `name` is the setting."""
    if not Path(path).is_dir():
        if "$" in path:
            raise ConfigError(path, "the variable is not set", "export it")
        remedy = "use a folder of records made by `bert tokenize`"
        raise DataError(f"{name} ({path})", "no such folder", remedy)
    return Path(path)


def refuse_another_vocabulary(
    tokenizer: TokenizerFolder, source: "Source", run: Path | None
) -> None:
    """Raise ConfigError if the records were made with another vocabulary or case than the model.

    Such a run would slowly unlearn the model. Additional pieces after the model's pieces extend the model. A model
    without a tokenizer cannot be compared. The run would continue a model in the folder of the `run`.
    """
    corpus = tokenizer.folder
    model = source.folder
    if not has_tokenizer(model):
        return
    ours = tokenizer.tokenizer.pieces
    theirs = source.tokenizer.tokenizer.pieces
    where = f"dataset_dir ({corpus})"
    remedy = "train new weights without --pretrained-ckpt-path"
    if ours != theirs and run is not None and run in model.parents:
        problem = f"holds a run whose vocabulary differs from the records in {corpus}"
        remedy = "use another folder for a new run, or use this run's own records"
        raise ConfigError(f"save_ckpt_path ({run})", problem, remedy)
    # Pieces that only the records have extend the model; the others must have the same numbers.
    for number, (our_token, their_token) in enumerate(zip_longest(ours, theirs)):
        if their_token is not None and our_token != their_token:
            differs = (
                f"token {number:,} is {our_token!r} in the records and {their_token!r} in the model"
            )
            problem = f"was made with another vocabulary than the model in {model} ({differs})"
            extend = "or with its extension by `bert vocab --extend`"
            remedy = f"make the records with --vocab {model}, {extend}, or {remedy}"
            raise ConfigError(where, problem, remedy)
    our_case = tokenizer.normalization
    their_case = source.tokenizer.normalization
    if our_case and their_case and our_case != their_case:
        cased = "--cased" if their_case.cased else "--no-cased"
        ours_and_theirs = (json.dumps(vars(case)) for case in (our_case, their_case))
        problem = f"was made with {f', and the model in {model} with '.join(ours_and_theirs)}"
        remedy = f"make the records with --vocab {model} {cased}, or {remedy}"
        raise ConfigError(where, problem, remedy)
