"""What XLA makes of a weight's move."""

import json
import subprocess
import sys

import pytest

# XLA reads its options when it first compiles something, so this needs a process of its own.
COUNT_LOOPS = """
import json, sys
import tensorflow as tf
from bert_cli.optim.adam import Hyperparameters, Optimizer, Rule
from bert_cli.parallel.tensorflow.runtime import fuse_results
from bert_cli.parallel.tensorflow.update import LARGE, WeightUpdater

fuse_results()
name, adapts = sys.argv[1], sys.argv[1] == "update_moments"
rule = Rule(decays=True, adapts=adapts)
optimizer = Optimizer(hyperparameters=Hyperparameters(), rules={"a/kernel": rule}, seed=1)
updater = WeightUpdater(optimizer, device="CPU:0", is_local=True, compiled=True)
held = [tf.Variable(tf.ones([LARGE // 512, 512])) for _ in range(4)]
told = [tf.constant(1.0), tf.constant(0)]
if not adapts:
    told = [tf.constant(1.0), tf.constant(1e-3), tf.constant(0), optimizer.key(1, 2)]
move = updater.function(getattr(updater, name), rule, held[0])
text = move.experimental_get_compiler_ir(*held, *told)(stage="optimized_hlo")
entry = text[text.index("ENTRY"):].splitlines()
whole = f"f32[{LARGE // 512},512]"
loops = [line.partition(" fusion(") for line in entry if " fusion(" in line]
print(json.dumps([results.count(whole) for results, _, _ in loops if whole in results]))
"""


@pytest.mark.parametrize("function", ["update_element_wise", "update_moments"])
def test_a_compiled_move_is_one_loop_with_three_results(function):
    told = subprocess.run(
        [sys.executable, "-c", COUNT_LOOPS, function], capture_output=True, text=True, check=True
    )
    assert json.loads(told.stdout.splitlines()[-1]) == [3]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_squared_norm_of_millions_of_elements_is_exact_to_float32(dtype):
    import numpy as np
    import tensorflow as tf

    from bert_cli.parallel.tensorflow.update import squared_norm

    tensor = tf.cast(tf.random.stateless_normal([3000, 768], [1, 2]) + 1.0, dtype)
    exact = np.sum(tensor.numpy().astype(np.float64) ** 2)
    assert float(squared_norm([tensor, tensor])) == pytest.approx(2 * exact, rel=3e-7)
    assert float(squared_norm([])) == 0.0
