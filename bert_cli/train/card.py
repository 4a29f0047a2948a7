"""Model cards: the `README.md` of a checkpoint or an export, which the Hugging Face hub shows.

A checkpoint's card is a function of its state.json. It has no times, complete paths or facts of the machine, so a
resumed run writes the same bytes.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath

from bert_cli import __version__
from bert_cli.facts.architectures import head_of_class
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.files import JSONObject, add_to_checkpoint
from bert_cli.model.names import hf
from bert_cli.text import count

CARD = "README.md"
TRAINING = "## Training\n"
THRESHOLDS = "## Thresholds\n"
CALIBRATION = "## Calibration\n"
BASELINES = "## Baselines on the same held-out examples\n"
# Task -> the code that runs the model.
CODE = {
    "question-answering": """from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{options})
model = AutoModelForQuestionAnswering.from_pretrained("."{options})
inputs = tokenizer("Who was it?", "It was Ada.", return_tensors="pt")
outputs = model(**inputs)
first, last = outputs.start_logits.argmax(), outputs.end_logits.argmax()
print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))""",
    "sentence-similarity": """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("."{options})
vectors = model.encode(["a query", "a text that may answer it"])
print(model.similarity(vectors, vectors))""",
}
ANY_TASK = """from transformers import pipeline

run = pipeline("{task}", model="."{options}{all})
print(run("{text}"))"""
ENCODE = """from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("."{options})
inputs = tokenizer("{text}", return_tensors="np")
"""
# Format of an export -> the code that runs the tokenizer's inputs.
RUNTIMES = {
    "onnx": """import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
print(session.run(None, dict(inputs)))""",
    "tflite": """import tensorflow as tf

run = tf.lite.Interpreter("model.tflite").get_signature_runner()
print(run(**{{name: ids.astype("int32") for name, ids in inputs.items()}}))""",
    "saved-model": """import tensorflow as tf

run = tf.saved_model.load(".").signatures["serving_default"]
print(run(**{{name: tf.constant(ids, tf.int32) for name, ids in inputs.items()}}))""",
}


def model_card(
    config: JSONObject,
    parameters: int,
    sections: Sequence[str],
    *,
    is_embedding: bool,
    runtime: str = "hf",
    license_id: str | None = None,
) -> str:
    """Return the card of a model with this config.json; its code opens it there, by the runtime of an export."""
    shape = hf.config_of(config)
    name = str(config["architectures"][0])
    head = head_of_class(name)
    assert head is not None
    task = head.task
    if task == "embed":
        task = "sentence-similarity" if is_embedding else "feature-extraction"
    code = ENCODE + RUNTIMES[runtime] if runtime in RUNTIMES else CODE.get(task, ANY_TASK)
    code = code.format(
        task=task,
        options=", trust_remote_code=True" if hf.class_files(shape, head) else "",
        all=", top_k=None" if config.get("problem_type") == SEVERAL_LABELS else "",
        text="A [MASK] in a text." if head.fills_masks else "A text.",
    )
    library = "sentence-transformers" if is_embedding else "transformers"
    entries = {
        "license": license_id,
        "library_name": library if runtime == "hf" else runtime,
        "pipeline_tag": task,
        "tags": f"[{shape.architecture}]",
    }
    front = "".join(f"{key}: {value}\n" for key, value in entries.items() if value)
    labels = ", ".join(f"`{label}`" for label in (config.get("id2label") or {}).values())
    summary = (
        f"A {name} for {task} with {parameters:,} parameters: "
        f"{count(shape.num_hidden_layers, 'layer')} of hidden size {shape.hidden_size} with "
        f"{count(shape.num_attention_heads, 'attention head')}, a vocabulary of "
        f"{shape.vocab_size:,} pieces, at most {shape.max_position_embeddings} tokens in a text."
    )
    use = f"## Use\n\n```python\n{code}\n```"
    parts = [f"---\n{front}---", f"# {name}", summary, labels and f"Labels: {labels}", use]
    return "\n\n".join(part.strip() for part in [*parts, *sections] if part) + "\n"


def training_section(state: JSONObject) -> str:
    """Return the section of a card on the training of a checkpoint, from its state.json."""
    settings = state.get("settings", {})
    fixed = state["fixed"]
    start = PurePath(settings.get("pretrained_ckpt_path") or "")
    # The name of a run says more than that of its checkpoint.
    start = start.parent if start.name.startswith("step_") else start
    distillation = settings.get("distillation") or {}
    command = f"`bert {settings.get('command', '?')}` of bert-cli {__version__}"
    rows = {
        "command": f"{command}, settings in state.json",
        "data": _data(settings, state.get("epoch_size")),
        "starts from": start.name,
        "teacher": PurePath(distillation.get("teacher") or "").name,
        "steps": f"{state['step']:,} of {fixed.get('total_steps', 0):,}",
        "examples of a step": fixed.get("examples_per_step"),
        **{name: settings.get(name) for name in ("max_seq_length", "precision", "seed")},
    }
    return table(TRAINING, {name: value for name, value in rows.items() if value not in (None, "")})


def add_section(checkpoint: Path, section: str) -> None:
    """Add a section to the end of a checkpoint's card, instead of one with its heading."""
    path = checkpoint / CARD
    text = without(path.read_text(encoding="utf-8"), section.partition("\n")[0])
    add_to_checkpoint(checkpoint, CARD, f"{text}\n{section.rstrip()}\n".encode())


def without(text: str, *headings: str) -> str:
    """Return a card without the sections with these headings."""
    sections = re.split(r"\n\n(?=## )", text.rstrip())
    kept = (part for part in sections if part.partition("\n")[0] not in headings)
    return "\n\n".join(kept) + "\n"


def decision_section(decision: JSONObject) -> str:
    """Return the section on how outputs become answers, from the content of decision.json; "" if nothing was chosen."""
    if temperature := decision.get("temperature"):
        about = "Divide the logits by it before the softmax; `bert predict` does, and an export has it in its weights."
        return f"{table(CALIBRATION, {'temperature': f'{temperature:.4f}'})}\n\n{about}\n"
    rows = {name: f"{value:.4f}" for name, value in decision.get("thresholds", {}).items()}
    if not rows:
        return ""
    about = "A text has a label if the sigmoid of its output is above the threshold, also in decision.json."
    return f"{table(THRESHOLDS, rows)}\n\n{about}\n"


def table(heading: str, rows: JSONObject) -> str:
    """Return a section of a card with a row for each value."""
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join([heading, "| | |", "|---|---|", *lines])


def _data(settings: JSONObject, epoch_size: int | None) -> str:
    """Return the last names of the folders and files of the examples, and the number of examples."""
    if settings.get("generated_dataset"):
        return "synthetic examples"
    values = [settings.get("train_file"), settings.get("dataset_dir")]
    values.append((settings.get("distillation") or {}).get("unlabelled_file"))
    lists = [value if isinstance(value, list) else [value] for value in values]
    corpora = [corpus for corpora in lists for corpus in corpora if corpus]
    paths = [corpus["path"] if isinstance(corpus, dict) else corpus for corpus in corpora]
    names = ", ".join(dict.fromkeys(PurePath(path).name for path in paths))
    unit = "pairs of its texts" if settings.get("few") else "examples"
    return f"{names}, {epoch_size:,} {unit}" if epoch_size else names
