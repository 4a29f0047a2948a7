"""`bert squad-score`: the official scores of a file of answers, F1 and exact match in per cent."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from bert_cli.config.finetune import SquadScoreSettings
from bert_cli.data.finetune.squad import read_gold, squad_scores
from bert_cli.errors import DataError, count
from bert_cli.files import read_json

Probability = Annotated[float, Field(strict=True, allow_inf_nan=False)]


def run(settings: SquadScoreSettings) -> None:
    """Score a file of predictions; only one JSON object goes to standard output."""
    gold, path = read_gold(settings.gold), settings.na_prob_file
    remedy = 'give question id -> answer, where "" is no answer'
    predictions = read_json(settings.predictions, dict[str, str], DataError, remedy)
    known = dict(gold.answers)
    missing = [name for name in known if name not in predictions]
    foreign = [name for name in predictions if name not in known]
    for names, problem in (
        (missing, f"of {len(known)} have no answer; each scores 0"),
        (foreign, "are not in the gold file; their answers are not scored"),
    ):
        if names:
            print(f"{settings.predictions}: {_counted(names)} {problem}", file=sys.stderr)
    odds = None
    if path is not None:
        if not gold.version_2:
            problem = f"has no effect with {settings.gold}, where every question has an answer"
            raise DataError(f"na_prob_file ({path})", problem, "leave it out")
        remedy = "give question id -> probability of no answer, for each question"
        odds = read_json(path, dict[str, Probability], DataError, remedy)
        if missing := [name for name in known if name not in odds]:
            raise DataError(str(path), f"lacks {_counted(missing)}", remedy)
    print(json.dumps(squad_scores(gold, predictions, odds, settings.na_prob_thresh)))


def _counted(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{count(len(names), 'question')} ({shown})"
