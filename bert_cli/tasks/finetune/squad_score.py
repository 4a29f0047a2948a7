"""`bert squad-score`: the official scores of a file of answers, F1 and exact match in per cent."""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bert_cli.config.finetune import SquadScoreSettings
from bert_cli.data.finetune.metrics import Gold, squad_scores
from bert_cli.data.finetune.squad import read_gold, read_json
from bert_cli.data.finetune.tables import read_text
from bert_cli.errors import DataError


def run(settings: SquadScoreSettings) -> None:
    """Score a file of predictions; only one JSON object goes to standard output."""
    gold = read_gold(settings.gold)
    predictions = read_predictions(settings.predictions)
    for line in mismatches(gold, predictions):
        print(f"{settings.predictions}: {line}", file=sys.stderr)
    path = settings.na_prob_file
    if path is None:
        print(json.dumps(squad_scores(gold, predictions)))
        return
    if not gold.version_2:
        problem = f"has no effect with {settings.gold}, where every question has an answer"
        raise DataError(f"na_prob_file ({path})", problem, "leave it out")
    odds = read_no_answer_probabilities(path, gold)
    print(json.dumps(squad_scores(gold, predictions, odds, settings.na_prob_thresh)))


def read_predictions(path: Path) -> dict[str, str]:
    """Return the answer of each question id. DataError, with the line, for anything but texts."""
    parsed = _read_object(path, "question id -> answer")
    for name, answer in parsed.items():
        if not isinstance(answer, str):
            problem = f"the answer to '{name}' is not a string"
            raise DataError(_line(path, name), problem, 'give a text, or "" for no answer')
    return parsed


def read_no_answer_probabilities(path: Path, gold: Gold) -> dict[str, float]:
    """Return the probability of no answer of all gold questions. DataError for anything else."""
    parsed = _read_object(path, "question id -> probability of no answer")
    for name, value in parsed.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise DataError(_line(path, name), f"'{name}' has no number", "give a probability")
    missing = [name for name, _ in gold.answers if name not in parsed]
    if missing:
        problem = f"lacks {_counted(missing)}"
        raise DataError(str(path), problem, "give a probability for each question")
    return parsed


def _read_object(path: Path, content: str) -> dict[str, Any]:
    parsed = read_json(path)
    if not isinstance(parsed, dict):
        raise DataError(str(path), "is not a JSON object", f"give {content}")
    return parsed


def _line(path: Path, name: str) -> str:
    r"""Return a file with the line of a JSON object's last key of this name.

    A key with unusual escapes, "\u0061" for an "a", is not recognized; then it is the first line.
    """
    text = read_text(path)
    spelt = {json.dumps(name), json.dumps(name, ensure_ascii=False)}
    pattern = "|".join(re.escape(word) for word in spelt)
    starts = [match.start() for match in re.finditer(rf"(?:{pattern})\s*:", text)]
    return f"{path} (line {text.count(chr(10), 0, starts[-1] if starts else 0) + 1})"


def mismatches(gold: Gold, predictions: Mapping[str, str]) -> list[str]:
    """Return warnings about ids that only one side has."""
    known = dict(gold.answers)
    missing = [name for name in known if name not in predictions]
    foreign = [name for name in predictions if name not in known]
    lines = []
    if missing:
        lines.append(f"{_counted(missing)} of {len(known)} have no answer; each scores 0")
    if foreign:
        lines.append(f"{_counted(foreign)} are not in the gold file; their answers are not scored")
    return lines


def _counted(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} question{'s' if len(names) > 1 else ''} ({shown})"
