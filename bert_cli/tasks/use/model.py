"""A model from Python, as `bert_cli.load` returns it: the code of `bert predict`, without its files and lines.

Shapes: n texts, D hidden size.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_cli.arrays import Floats32
from bert_cli.config.use import PredictSettings
from bert_cli.errors import ConfigError
from bert_cli.processes import print_error
from bert_cli.settings.markers import Engine
from bert_cli.tasks.model.opened import Input, Predictor, Row
from bert_cli.tasks.use.predict import build, check_input, check_number_of_texts, input_of, prepare
from bert_cli.text import count


class Model:
    """A trained model. A row is what `bert predict` prints for a text, with the same keys.

    A method raises ConfigError if the model was not trained for its task, DataError for an empty text. A longer text
    than the model reads has `"truncated": True` in its row, and is counted in a warning on standard error.
    """

    def __init__(
        self, name: str, engine: Engine | None = None, none_below: float | None = None
    ) -> None:
        self._fields = {"model": name}
        if engine is not None:
            self._fields["engine"] = engine
        fields: dict[str, object] = {**self._fields}
        if none_below is not None:
            fields["none_below"] = none_below
        prediction = prepare(PredictSettings.model_validate(fields))
        self.source = prediction.source
        self.task = prediction.task
        """The task that the model was trained for, as `bert predict --task` names it."""
        self._predictors = {self.task: build(prediction)}

    def embed(self, texts: Sequence[str]) -> Floats32:
        """Return the vectors [n, D] of texts. Every model has some; those of `bert embed` are made to be compared."""
        rows = self._of_texts("embed", texts)
        return np.array([row["embedding"] for row in rows], np.float32)

    def fill(self, text: str) -> list[list[Row] | None]:
        """Return the most probable words for each [MASK]: `word`, `probability`; None where the text is cut off."""
        masks: list[list[Row] | None] = self._of_texts("fill-mask", [text])[0]["masks"]
        return masks

    def label(self, texts: Sequence[str | tuple[str, str]]) -> list[Row]:
        """Return a row for each text or pair: `label`, `probability`, `probabilities`; or `labels`, or `score`."""
        return self._of_texts("text-classification", texts)

    def entities(self, texts: Sequence[str]) -> list[list[Row]]:
        """Return the entities of each text: `type`, `text`, and its characters from `start` to before `end`."""
        rows = self._of_texts("token-classification", texts)
        if rows and "entities" not in rows[0]:
            problem = "are not labels of entities: O, B-type and I-type"
            raise ConfigError("the model's labels", problem, "use `bert predict` for each word's")
        return [row["entities"] for row in rows]

    def answer(self, question: str, context: str) -> Row:
        """Return the row of a question: `answer`, `probability`, and the characters `start` to `end` of the context."""
        return self._rows("question-answering", [{"question": question, "context": context}])[0]

    def check(
        self, row: Mapping[str, object], task: str | None = None, where: str = "text"
    ) -> Input:
        """Return the checked fields of a JSON object. Raises DataError if the task has no answer to it."""
        kind = type(self._predictor(task or self.task))
        item = input_of(row, where, kind, task or self.task)
        check_input(item, kind)
        kind.check(item)
        return item

    def predict(self, inputs: Sequence[Input], task: str | None = None) -> list[Row]:
        """Return the rows of checked inputs."""
        if not inputs:
            return []
        return self._predictor(task or self.task).answer(inputs)

    def _of_texts(self, task: str, texts: Sequence[str | tuple[str, str]]) -> list[Row]:
        if isinstance(texts, str):  # a sequence of letters
            raise ConfigError("texts", "is one text", "put it into a list")
        # More than two texts are no second text.
        rows = []
        for text in texts:
            if not isinstance(text, tuple | list):
                rows.append({"text": text})
            elif len(text) == 2:
                rows.append({"text": text[0], "second": text[1]})
            else:
                rows.append({"text": text[0], "second": text[1:]})
        return self._rows(task, rows)

    def _rows(self, task: str, rows: Sequence[Mapping[str, str]]) -> list[Row]:
        inputs = [self.check(row, task, f"text {n}") for n, row in enumerate(rows, 1)]
        check_number_of_texts(self.source, task, inputs)
        answers = self.predict(inputs, task)
        cut = sum("truncated" in row for row in answers)
        if cut:
            print_error(
                f"warning: only the beginnings of {count(cut, 'text')} were read; split them"
            )
        return answers

    def _predictor(self, task: str) -> Predictor:
        if task not in self._predictors:
            settings = PredictSettings.model_validate({**self._fields, "task": task})
            self._predictors[task] = build(prepare(settings))
        return self._predictors[task]
