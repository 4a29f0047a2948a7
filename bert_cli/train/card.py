"""Model cards: the `README.md` of a checkpoint or an export, which the Hugging Face hub shows.

A checkpoint's card is a function of its state.json. It has no times, complete paths or facts of the machine, so a
resumed run writes the same bytes.
"""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path, PurePath

from bert_cli import __version__
from bert_cli.facts.architectures import head_of_class
from bert_cli.facts.heads import SEVERAL_LABELS
from bert_cli.files import JSONObject, add_to_checkpoint
from bert_cli.model.names import hf
from bert_cli.text import count

CARD = "README.md"
TEMPLATE = Path(__file__).with_name("card.md")
TRAINING = "## Training\n"
THRESHOLDS = "## Thresholds\n"
CALIBRATION = "## Calibration\n"
BASELINES = "## Baselines on the same held-out examples\n"


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
    from jinja2 import Environment

    shape = hf.config_of(config)
    name = str(config["architectures"][0])
    head = head_of_class(name)
    assert head is not None
    task = head.task
    if task == "embed":
        task = "feature-extraction"
        if is_embedding:
            task = "sentence-similarity"
    # The name by which the Hugging Face hub shows how a model is opened.
    library = runtime
    if runtime == "hf":
        library = "sentence-transformers" if is_embedding else "transformers"
    options = ", trust_remote_code=True" if hf.class_files(shape, head) else ""
    has_several_labels = config.get("problem_type") == SEVERAL_LABELS
    all_labels = ", top_k=None" if has_several_labels else ""
    example = "A [MASK] in a text." if head.fills_masks else "A text."
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        name=name,
        task=task,
        shape=shape,
        count=count,
        parameters=parameters,
        labels=config.get("id2label"),
        license_id=license_id,
        library=library,
        runtime=runtime,
        options=options,
        all=all_labels,
        text=example,
    )
    return "\n\n".join(part.strip() for part in [text, *sections] if part) + "\n"


def training_section(state: JSONObject) -> str:
    """Return the section of a card on the training of a checkpoint, from its state.json."""
    settings = state.get("settings", {})
    fixed = state["fixed"]
    start = PurePath(settings.get("pretrained_ckpt_path") or "")
    # The name of a run says more than that of its checkpoint.
    if start.name.startswith("step_"):
        start = start.parent
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
    temperature = decision.get("temperature")
    if temperature:
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
    corpora = list(filter(None, chain.from_iterable(lists)))
    paths = []
    for corpus in corpora:
        paths.append(corpus["path"] if isinstance(corpus, dict) else corpus)
    names = ", ".join(dict.fromkeys(PurePath(path).name for path in paths))
    if not epoch_size:
        return names
    unit = "pairs of its texts" if settings.get("few") else "examples"
    return f"{names}, {epoch_size:,} {unit}"
