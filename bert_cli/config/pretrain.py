"""The settings of pre-training: the records, the masks, and what changes over the run."""

from pathlib import Path
from typing import Literal

from pydantic import field_validator

from bert_cli.config.data import check_mask_tokens
from bert_cli.config.training import TrainSettings, WeightedCorpus
from bert_cli.facts import heads
from bert_cli.facts.architectures import ARCHITECTURES
from bert_cli.facts.bert import BertConfig
from bert_cli.facts.masking import Masking, packed_predictions
from bert_cli.settings.markers import Fixed, PathOrName, Usual
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import SettingError


class PretrainSettings(TrainSettings):
    """Pre-train BERT with masked-LM and next-sentence prediction.

    Example: bert pretrain --config configs/pretrain_tiny_128_phase1.json --dataset-dir data/demo/128
    Example: bert pretrain --config pretrain_base_512_phase2 --pretrained-ckpt-path runs/base_128_phase1
    """

    COMMAND = "pretrain"
    HEAD = heads.PRETRAINING
    NEEDS = dict.fromkeys(
        ("evaluate_every_steps", "evaluation_examples", "baselines"), "validation_dir"
    )

    dataset_dir: Usual[PathOrName | list[WeightedCorpus] | None] = None
    """Folder of records with a corpus.json. To mix several folders by weight, repeat the
    flag, or use a list of {"path": ..., "weight": ...} in the config. `$DATASETS_DIR` and `~` are expanded."""
    validation_dir: Usual[PathOrName | None] = None
    """Folder of records for the evaluation every `evaluate_every_steps`."""
    generated_dataset: Fixed[bool] = False
    """Train on synthetic examples instead of the records in dataset_dir, to test a machine or a layout."""
    max_predictions_per_seq: Fixed[Usual[Positive]]
    """Maximum number of masked tokens of an example."""
    scaling: Fixed[Literal["unit"] | None] = None
    """Unit Scaling: weights, activations and gradients have a variance of about 1, so that float16 needs no loss scale.
    Checkpoints are plain BERTs."""
    masking: Fixed[Masking] = Masking()
    """Choice of the masked tokens in dynamic records; they differ in each epoch."""
    max_sequences_per_pack: Fixed[Positive] = 1
    """Maximum number of sequences in a pack. With 2 or more, short sequences of dynamic records are packed while
    reading, and samples and the batch of the learning rate are counted in sequences."""
    evaluation_examples: Positive = 10_000
    """Examples of an evaluation, from the start of the validation order."""

    @field_validator("dataset_dir", mode="before")
    @classmethod
    def _paths_become_corpora(cls, value: object) -> object:
        if not isinstance(value, list):
            if isinstance(value, Path):
                return str(value)
            return value
        if len(value) == 1 and isinstance(value[0], str):
            return value[0]
        corpora = []
        for item in value:
            corpora.append({"path": item} if isinstance(item, str) else item)
        return corpora

    @property
    def corpora(self) -> list[WeightedCorpus]:
        """Return the folders of `dataset_dir` with their weights."""
        records = self.dataset_dir
        if isinstance(records, str):
            return [WeightedCorpus(path=records)]
        return records or []

    @property
    def dataset_paths(self) -> list[str]:
        """Return the folders of `dataset_dir`."""
        return [corpus.path for corpus in self.corpora]

    @property
    def masked(self) -> int:
        """Return the maximum number of masked positions of an example."""
        sizes = self.max_seq_length, self.max_sequences_per_pack, self.max_predictions_per_seq
        return packed_predictions(*sizes, self.masking.highest_probability)

    @property
    def sequences(self) -> int:
        """Return the maximum number of sequences of an example."""
        return self.max_sequences_per_pack

    @property
    def unit_scaling(self) -> str | None:
        """Return the setting `scaling`."""
        return self.scaling

    @property
    def mask_probabilities(self) -> tuple[float, float] | None:
        """Return the fractions of tokens that the first and the last step mask, if they differ."""
        first = self.masking.start_probability
        last = self.masking.probability
        if first in (None, last):
            return None
        return first, last

    def _check(self) -> None:
        model = self.bert_config
        optimizer = self.optimizer_opts
        plain = BertConfig()
        if ARCHITECTURES[model.architecture].has_scaling:
            plain = model
        required = {
            "bert_config.architecture": (model.architecture, plain.architecture),
            "bert_config.initializer_range": (model.initializer_range, 0.02),
            "optimizer_opts.max_gradient_norm": (optimizer.max_gradient_norm, None),
            "optimizer_opts.loss_scaling": (optimizer.loss_scaling, 1.0),
        }
        for name, (value, default) in required.items():
            if self.scaling and value != default:
                problem = f"{value} cannot be combined with scaling {self.scaling}"
                remedy = f"leave out scaling, or set the default ({default or 'none'})"
                raise SettingError(name, problem, remedy)
        check_mask_tokens(self, "max_predictions_per_seq", "max_seq_length")
        needed = round(self.max_seq_length * self.masking.highest_probability)
        predictions = self.max_predictions_per_seq
        if self.mask_probabilities and predictions < needed:
            problem = f"{predictions} is too low: masking masks up to {needed} tokens"
            raise SettingError("max_predictions_per_seq", problem, "raise it")
