"""The size of the package and the tests, and its bounds."""

from support.command_lines import script

size = script("size.py")


def test_folders_that_import_each_other_are_named_also_if_only_types_need_it(tmp_path):
    package = tmp_path / "bert_cli"
    for name, source in (
        ("facts/heads.py", "from bert_cli.config import base"),
        ("config/base.py", "if TYPE_CHECKING:\n    from bert_cli.facts.heads import Head"),
        ("config/deep/inner.py", "from bert_cli.config.base import Base"),
        ("config/base2.py", "from bert_cli.config.deep.inner import Inner"),
        ("tasks/run.py", "from bert_cli.facts import heads"),
    ):
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert size.folder_circles(package) == ["config <-> facts"]


def test_a_number_above_its_bound_is_named_with_both():
    package, tests = size.Size(lines=12_001, nodes=70), size.Size(lines=8)
    bounds = {"package-lines": 12_000, "package-nodes": 70, "test-lines": 8}
    (problem,) = size.exceeded(package, tests, bounds)
    assert problem.startswith("package-lines is 12,001, above the bound 12,000")
