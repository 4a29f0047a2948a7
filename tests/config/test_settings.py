"""What settings write into files, and the settings of a measurement."""

from support.orders import order
from support.settings import RUN

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
    given, _ = order("bench pretrain --config bench_tiny_128 --json x.json")
    chosen = laid_out(given, propose(workload_of(given), 1, 10**11, 1))
    assert str(chosen.json_file) == "x.json" and chosen.generated_dataset


def test_a_manifest_records_marked_settings_and_later_ones_only_where_they_are_set():
    paths = {"input": "a", "out": "b", "vocab": "c", "processes": 7}
    usual = recorded(TokenizeSettings.model_validate(paths))
    assert usual["masking"] == "static" and usual["random_seed"] == 12345
    assert not {*paths, "executor", "nsp", "text_field", "documents"} & {*usual}
    chosen = recorded(TokenizeSettings.model_validate({**paths, "nsp": False, "text_field": "x"}))
    assert chosen == {**usual, "nsp": False, "text_field": "x"}
