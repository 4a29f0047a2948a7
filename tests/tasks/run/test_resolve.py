"""What a run is resolved from: an order, and the model that it starts from."""

from types import SimpleNamespace

from support.tiny_models import TINY

from bert_cli.config.finetune import ClassifySettings
from bert_cli.tasks.run.resolve import with_shape_of


def test_a_dropout_that_is_set_wins_over_that_of_the_model():
    model = SimpleNamespace(config=TINY.model_copy(update={"hidden_dropout_prob": 0.5}))
    shape = {"hidden_dropout_prob": 0.2}
    order = ClassifySettings.model_validate({"train_file": "a.csv", "bert_config": shape})
    found = with_shape_of(order, model).bert_config
    assert found == TINY.model_copy(update=shape)
