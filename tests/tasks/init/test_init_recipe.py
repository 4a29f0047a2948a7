"""The choice of `bert init`, for texts and machines that are not here."""

import itertools
import json
import math
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support.settings import merged

from bert_cli.config.init import InitSettings
from bert_cli.config.pretrain import PretrainSettings
from bert_cli.facts.bert import BertConfig
from bert_cli.tasks.init.recipe import TABLE, Machine, Start, TextFacts, choose
from bert_cli.tasks.init.run import commands, search_commands
from bert_cli.tasks.init.text import mask_word

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "init-rules.md"
MACHINES = {
    "2 cores": Machine("CPU", 1, "mixed_bfloat16", 2 * 0.3e12),
    "8 cores": Machine("CPU", 1, "mixed_bfloat16", 8 * 0.3e12),
    "one 24 GB GPU": Machine("GPU", 1, "mixed_bfloat16", 0.3 * 165e12),
    "eight 80 GB GPUs": Machine("GPU", 8, "mixed_bfloat16", 8 * 0.3 * 312e12),
}
THREE = {"three 24 GB GPUs": Machine("GPU", 3, "mixed_bfloat16", 3 * 0.3 * 165e12)}
"""Devices that no batch is a multiple of."""
MEGABYTES = (1, 10, 40, 200)
BASE = "from a base model"
STARTS = {
    "from scratch": None,
    BASE: Start("bert-base-uncased", BertConfig(), "bert-base-uncased"),
}


def text(megabytes: float, **changes) -> TextFacts:
    """Return English articles of this size: 6 bytes a word, 1,700 words a document."""
    words = megabytes * 1e6 / 6
    facts = {"languages": {"en": 1.0}, "long_document": 3500.0, "pieces_per_word": 1.35} | changes
    return TextFacts(megabytes * 1e6, words, words / 1700, **facts)


def pick(megabytes=40.0, machine="8 cores", start="from scratch", hours=8.0, **changes):
    begins = STARTS.get(start, start)
    described = (MACHINES | THREE)[machine]
    return choose(text(megabytes, **changes), described, begins, hours, Path("mine"))


def row(megabytes: float, machine: str, start: str) -> str:
    """Return a row of the page's table."""
    chosen = pick(megabytes, machine, start)
    config = chosen.config
    values = {name: value for name, value, _ in chosen.rows}
    warned = " *" if chosen.warnings else ""
    batch = math.prod(config["global_batch"].values())
    epochs = values["epochs"].partition(",")[0]
    rate = f"{config['optimizer_opts']['learning_rate']['max_learning_rate']:g}"
    name = chosen.name if start == "from scratch" else ""
    cells = [f"{megabytes} MB", machine, name, epochs, str(batch), rate, values["time"] + warned]
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("start", STARTS)
def test_the_page_shows_the_choice(start):
    printed = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [row(size, "2 cores", start) for size in MEGABYTES]
    if start != "from scratch":
        rows = [line.replace(" |  | ", " | ") for line in rows]
    missing = [line for line in rows if line not in printed]
    assert not missing, "docs/init-rules.md lacks\n" + "\n".join(rows)


def test_the_speedrun_measures_the_plan_of_a_new_model():
    recipes = json.loads((ROOT / "scripts" / "speedrun.json").read_text())
    measured = merged(recipes["init-before"], recipes["init"])["settings"]
    planned = pick(51, "2 cores", hours=0.5).config
    for group in ("bert_config", "masking", "global_batch", "optimizer_opts", "precision"):
        complete = planned[group]
        if group == "bert_config":
            complete = {name: complete[name] for name in measured[group]}
        assert measured[group] == complete


def test_the_page_shows_the_table_of_rules():
    printed = PAGE.read_text(encoding="utf-8").splitlines()
    for name, rule in TABLE.items():
        assert f"| {name} | {rule['rule'].format(**rule)} | {rule['source']} |" in printed


def test_every_choice_is_a_valid_run_with_micro_batches_for_all_devices():
    for start, (machine, described) in itertools.product(STARTS, (MACHINES | THREE).items()):
        chosen = pick(10.0, machine, start)
        config = chosen.config
        settings = PretrainSettings.model_validate(config)
        assert settings.about is not None and str(settings.save_ckpt_path) == "mine/run"
        assert config["global_batch"]["grad_acc_steps_per_replica"] % described.devices == 0
        batch = math.prod(config["global_batch"].values())
        assert f"{batch}, " in {name: value for name, value, _ in chosen.rows}["batch"]


def test_little_text_is_not_for_training_from_scratch():
    (warning,) = pick(1.0).warnings
    assert "1 MB of text is too little to train from scratch" in warning
    assert "--from bert-base-uncased" in warning
    values = {name: value for name, value, _ in pick(1.0).rows}
    assert all(values.values())
    millions = float(re.search(r"its training part has ([\d.]+) million tokens", warning)[1])
    assert f", {1e6 * millions:,.0f} tokens" in values["length"]
    assert not pick(1.0, start=BASE).warnings


def test_more_text_and_hours_give_a_larger_model():
    names = [pick(size, "eight 80 GB GPUs").name for size in (10.0, 40.0, 200.0)]
    ordered = sorted(names, key=["mini", "small", "medium", "base"].index)
    assert names == ordered and len({*names}) > 1
    assert pick(400.0, "2 cores").name == "mini"
    assert pick(400.0, "eight 80 GB GPUs").name == "base"


@pytest.mark.parametrize(
    ("megabytes", "start", "hours"),
    [(200.0, BASE, 8.0), (5000.0, BASE, 200.0), (5.0, "from scratch", 0.1)],
)
def test_few_epochs_in_the_hours_are_a_warning_with_hours_for_all(megabytes, start, hours):
    chosen = pick(megabytes, "2 cores", start, hours=hours)
    assert chosen.seconds <= 3600 * hours
    warning = chosen.warnings[-1]
    said = re.search(r"for ([\d.]+) of (\d+) epochs; raise --hours to (\d+)", warning)
    few, wanted, enough = map(float, said.groups())
    reasons = {name: (value, why) for name, value, why in chosen.rows}
    assert reasons["epochs"][0].startswith(f"{few:g}, ")
    assert reasons["epochs"][1].startswith(f"what fits in the hours, of {wanted:g} (")
    # The plan fills 90 % of the hours. With 20 % more time it exceeds them; with 5 % less it does not.
    assert "; the second is more than --hours" in reasons["time"][1]
    every = pick(megabytes, "2 cores", start, hours=enough)
    assert every.config["num_epochs"] == wanted
    fewer = max(hours, 0.9 * (enough - 1))
    assert pick(megabytes, "2 cores", start, hours=fewer).config["num_epochs"] < wanted
    assert not [problem for problem in every.warnings if "epochs" in problem]


def test_much_text_for_a_new_model_is_a_warning_to_use_a_part():
    warning = pick(20_000.0, "2 cores", "from scratch", hours=200.0).warnings[-1]
    assert re.fullmatch(r"--hours 200 is enough for 0.\d+ of 40 epochs; use a part .*", warning)


def test_a_run_that_uses_little_of_the_hours_has_the_reason():
    def reason(**changes):
        return {name: why for name, _, why in pick(**changes).rows}["time"]

    assert "the text is small: more text" in reason(megabytes=1.0, start=BASE)
    assert "more text" not in reason(megabytes=200.0, start=BASE)


def test_hours_in_which_nothing_is_learnt_are_refused_with_the_shortest_plan():
    chosen = pick(start=BASE, machine="2 cores", hours=0.01)
    problem = r"hours \(--hours\): is time for \d+ examples on this .*use --hours (\S+) or more"
    hours = float(re.match(problem, str(chosen.refusal))[1])
    (time,) = [(value, why) for name, value, why in chosen.rows if name == "time"]
    assert "the second is more than --hours" in time[1]
    assert pick(start=BASE, machine="2 cores", hours=hours).refusal is None
    assert not any("--hours" in warning for warning in chosen.warnings)


def test_new_pieces_are_added_where_words_are_split_into_many():
    assert pick(start=BASE).new_pieces == 0
    assert pick(start=BASE, pieces_per_word=1.9).new_pieces == 1000
    assert pick(0.5, start=BASE, pieces_per_word=1.9).new_pieces == 0


def test_short_documents_have_short_records():
    assert pick(long_document=20.0).config["max_seq_length"] == 32
    assert pick().config["max_seq_length"] == 128
    # [CLS] and [SEP] are positions, too.
    lengths = [
        pick(long_document=words / 2, pieces_per_word=2.0).config["max_seq_length"]
        for words in (29, 30, 31, 62, 63, 126, 127)
    ]
    assert lengths == [32, 32, 64, 64, 128, 128, 128]


@pytest.mark.parametrize("is_cased", [False, True])
def test_every_command_that_reads_words_has_the_case_of_the_model(is_cased):
    start = Start("bert", BertConfig(), "bert-base", is_cased=is_cased)
    chosen = pick(start=start, pieces_per_word=1.9)
    lines = commands(chosen, "fill-mask", "en", "A sentence is here.")
    words = [line for line in lines if " vocab " in line or " tokenize " in line]
    assert len(words) == 3 and all((" --cased" in line) == is_cased for line in words)
    assert "--extend bert-base --size +1000" in words[0]


@pytest.mark.parametrize("goal", ["fill-mask", "labels", "search"])
def test_the_shell_reads_the_printed_commands_as_they_are_meant(goal):
    """A folder, a model and a sentence with all that a shell interprets."""
    odd = """it's a "$(id)" \\ `id` & more; * #1"""
    if goal == "search":
        values = {"input": odd, "out": odd, "from": odd, "for": goal, "text_field": odd}
        lines = search_commands(InitSettings.model_validate(values), odd, is_plain=True)
        expected = {odd: 4, f"{odd}/search.index": 2}
    else:
        start = Start(odd, BertConfig(), odd)
        chosen = replace(pick(start=start, pieces_per_word=1.9), out=Path(odd))
        lines = commands(chosen, goal, "en", odd)
        expected = {odd: 2, f"{odd}/pretrain.json": 2, f"{odd}/records/train": 1}
        expected |= {mask_word(odd): 1} if goal == "fill-mask" else {f"{odd}/classifier": 1}
    shell = """bert() { printf '%s\\0' "$@"; }\n"""
    words = ["bash", "-euo", "pipefail", "-c", shell + "\n".join(lines)]
    printed = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    assert {word: printed.count(word) for word in expected} == expected
    assert all(word.startswith(odd) for word in printed if "it's" in word and "[MASK]" not in word)
