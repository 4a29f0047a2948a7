"""`bert export --precision int8`: dynamic quantization of an ONNX graph, and how many predictions it changes.

Weights of products and embeddings become 8-bit integers with a scale for each output column; activations are quantized
while the graph runs, which needs no calibration data. Outputs differ by far more than rounding; what matters is whether
predictions change, which `compare` measures. Shapes: B examples, S positions, D hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from bert_cli.arrays import Array, Floats32, Ints32
from bert_cli.config.use import PredictSettings
from bert_cli.data.finetune import embeddings
from bert_cli.data.finetune.features import by_length, encode_texts
from bert_cli.data.tokens.tokenizer import read_tokenizer
from bert_cli.errors import DataError
from bert_cli.processes import print_error
from bert_cli.tasks.model import models
from bert_cli.tasks.model.opened import INPUTS, Input, OpenedModel, inputs_of
from bert_cli.tasks.model.predictions import predictors
from bert_cli.tasks.use import predict

# Operators whose weights are quantized. Without Gather, embeddings in float32 are 47 of MiniLM's 59 MB.
OPERATORS = ["MatMul", "Gemm", "Gather"]
# Agreement of the predictions with float32 below which the command warns, and `bert predict` does not use the graph.
# Above it, an accuracy loses at most 0.02.
LEAST_AGREEMENT = 0.98
MAX_TEXTS = 512  # texts of a file that are compared: the first
MAX_TOKENS = 512  # tokens of a text that are compared: the first
# Examples that are compared at once: the logits of a vocabulary of 30,522 take 63 MB for an example of 512 tokens.
BATCH = 8
Columns = Mapping[str, Ints32]
Outputs = Mapping[str, Floats32]


def quantize(path: Path) -> None:
    """Replace a float32 ONNX graph with its dynamic quantization."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    # Folds the transposed embeddings of a masked-LM head into a weight; only weights are quantized.
    folded = path.with_suffix(".folded.onnx")
    quant_pre_process(str(path), str(folded), skip_onnx_shape=True, skip_symbolic_shape=True)
    graph = onnx.load(folded)
    folded.unlink()
    # PyTorch lists shapes of weights there, and ONNX Runtime refuses the shapes of weights that it transposes.
    del graph.graph.value_info[:]
    # 7 bits of weights: with 8, the sums of two products overflow 16 bits on processors without VNNI.
    weights = {"weight_type": QuantType.QInt8, "per_channel": True, "reduce_range": True}
    quantize_dynamic(graph, path, OPERATORS, **weights)


def read_texts(path: Path | None, source: models.Source, task: str) -> list[Input]:
    """Return the first texts of a file in a form that `bert predict` reads, none without. Raises DataError for few."""
    if path is None:
        return []
    task_class = predictors()[task]
    columns = predict.default_columns(source, path, task)
    settings = PredictSettings(model=".", input=path, text_column=columns)
    items = []
    for item in predict.read_inputs(settings, task_class, task, "rename one"):
        predict.check_input(item, task_class)
        if not predict.is_empty(item, task_class):
            items.append(item)
    if len(items) < 3:
        raise DataError(str(path), "has fewer than 3 texts", "use some hundred")
    return items[:MAX_TEXTS]


def read_batches(texts: Sequence[Input], model: OpenedModel, task: str) -> Iterator[Columns]:
    """Yield the columns of texts, which are truncated at MAX_TOKENS."""
    task_class = predictors()[task]
    names = [*task_class.FIELDS, *task_class.OPTIONAL]
    columns = [[item.fields.get(name, "") for item in texts] for name in names]
    second = columns[1] if len(columns) > 1 else None
    tokenizer = read_tokenizer(model.source.folder)
    length = min(model.source.config.max_position_embeddings, MAX_TOKENS)
    features, _ = encode_texts(tokenizer, columns[0], second, {}, max_seq_length=length)
    models.check_segments(model.source.config, features)
    inputs = inputs_of(model.source.config)
    for rows in by_length(features, BATCH):
        batch = features.batch(rows, int(features.lengths[rows].max()))
        yield {name: batch[INPUTS[name]] for name in inputs}


def largest_difference(first: Floats32, second: Floats32, mask: Ints32) -> float:
    """Return the largest difference of an output, without padding where the output is one of positions [B, S, ...]."""
    differences = np.abs(first - second)
    # Padding that reads nothing but padding has no defined output.
    if second.shape[:2] == mask.shape:
        differences = differences[mask > 0]
    return float(differences.max())


def compare(
    model: OpenedModel,
    batches: Iterable[Columns],
    expected: Callable[[Columns], Outputs],
    quantized: Callable[[Columns], Outputs],
) -> tuple[str, bool]:
    """Return a sentence on the differences between two models, and whether their predictions agree; warn if not."""
    examples = 0
    answers = []
    for columns in batches:
        before = expected(columns)
        after = quantized(columns)
        examples += len(columns["attention_mask"])
        # Answers instead of outputs: logits of a vocabulary would fill the memory.
        answers.append((_answers(model, before, columns), _answers(model, after, columns)))
    first, second = (np.concatenate(parts) for parts in zip(*answers, strict=True))
    what = "rank correlation of the scores"
    if first.ndim == 2:
        what = "rank correlation of the similarities of texts"
        first, second = map(similarities, (first, second))
    if first.dtype == np.float32:
        agreement = float(spearmanr(first, second).statistic)
    else:
        what = "fraction of equal predictions"
        agreement = float((first == second).mean())
    if not agreement >= LEAST_AGREEMENT:
        problem = f"the {what} is {agreement:.4f}, less than {LEAST_AGREEMENT}"
        remedy = "score the export on your own data, or leave out --precision"
        print_error(f"warning: precision (int8): {problem}; {remedy}")
    sentence = f"int8 against float32 on {examples:,} examples: {what} {agreement:.4f}"
    return sentence, agreement >= LEAST_AGREEMENT


def _answers(model: OpenedModel, outputs: Outputs, columns: Columns) -> Array:
    """Return the predictions of a batch: integers, scores [B] or vectors [B, D] in float32."""
    is_real = columns["attention_mask"] > 0
    hidden_BSD = outputs.get("last_hidden_state")
    if hidden_BSD is not None:
        if embeddings.read_embedding(model.source.folder).get("pooling") == "cls":
            return hidden_BSD[:, 0]
        weights_BS1 = (is_real / is_real.sum(1, keepdims=True)).astype(np.float32)[:, :, None]
        return (hidden_BSD * weights_BS1).sum(1)
    if "start_logits" in outputs:
        # Padding may have the highest score, as no one reads it.
        ends = [np.where(is_real, outputs[f"{name}_logits"], -np.inf) for name in ("start", "end")]
        return np.concatenate([logits.argmax(1) for logits in ends])
    if "logits" in outputs:
        logits = outputs["logits"]
    else:
        logits = outputs["prediction_logits"]
    if model.label_names is None and logits.shape[1:] == (1,):
        return logits[:, 0]
    if model.source.has_several_labels:
        return model.decision.answers(logits, several=True).reshape(-1)
    best = logits.argmax(-1)
    if best.ndim == 2:
        return best[is_real]
    return best


def similarities(vectors: Floats32) -> Floats32:
    """Return the cosines of all pairs of vectors [n, D]."""
    units = embeddings.unit_vectors(vectors)
    # Each pair once, without the pairs of a text with itself.
    return (units @ units.T)[np.triu_indices(len(units), 1)]
