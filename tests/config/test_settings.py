"""What settings write into files, and the standard benchmarks."""

from support.orders import order
from support.settings import RUN

from bert_cli.cli import main
from bert_cli.config.bench import benchmarks, expand_benchmark
from bert_cli.config.data import TokenizeSettings
from bert_cli.config.markers import recorded
from bert_cli.planning.layout import propose
from bert_cli.planning.workload import laid_out, workload_of


def test_a_plain_run_writes_no_settings_of_other_architectures(tmp_path, monkeypatch):
    """Runs from before them resume, and a file that names the architecture keeps it."""
    monkeypatch.chdir(tmp_path)
    dumps = []
    for architecture in ("bert", "groupbert"):
        config = {"architecture": architecture, "num_hidden_layers": 2}
        settings, _ = order("pretrain", RUN | {"bert_config": config})
        assert settings.model_dump(exclude_unset=True)["bert_config"] == config
        dumps.append(settings.model_dump(mode="json"))
    plain, grouped = (dump["bert_config"] for dump in dumps)
    added = {"architecture", "conv_kernel_size", "conv_group_size", "ffn_groups"}
    assert grouped.keys() - plain.keys() == added
    assert "warmup_power" not in dumps[0]["optimizer_opts"]["learning_rate"]


def test_a_chosen_layout_keeps_the_other_settings_of_a_measurement():
    given, _ = order(
        "bench pretrain --config pretrain_tiny_128_phase1 --parallel.layout auto --json x.json"
    )
    chosen = laid_out(given, propose(workload_of(given), "GPU", 1, 10**11, 1))
    assert str(chosen.json_file) == "x.json" and chosen.generated_dataset


def test_a_standard_benchmark_is_a_named_command_line_that_flags_override(capsys):
    assert main(["bench", "--list"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for name, (_, words) in benchmarks().items():
        assert expand_benchmark(["bench", name]) == words
        assert f"bert {' '.join(words[:2])} " in lines[name]
        assert order(words)[0].generated_dataset
    for words, message in ((["tiny_129"], "did you mean 'tiny_128'?"), ([], "bert bench --list")):
        assert main(["bench", *words]) == 2
        assert message in capsys.readouterr().err
    words = ["bench", "base_128", "--global-batch.replicas=2", "--steps", "3"]
    settings, _ = order(expand_benchmark(words))
    assert (settings.global_batch.replicas, settings.steps) == (2, 3)
    assert settings.parallel.layout == "auto"


def test_a_manifest_records_marked_settings_and_later_ones_only_where_they_are_set():
    paths = {"input": "a", "out": "b", "vocab": "c", "processes": 7}
    usual = recorded(TokenizeSettings.model_validate(paths))
    assert usual["masking"] == "static" and usual["random_seed"] == 12345
    assert not {*paths, "executor", "nsp", "text_field", "documents"} & {*usual}
    chosen = recorded(TokenizeSettings.model_validate({**paths, "nsp": False, "text_field": "x"}))
    assert chosen == {**usual, "nsp": False, "text_field": "x"}
