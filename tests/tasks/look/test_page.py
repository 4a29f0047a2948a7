"""The page of some runs: one file, readable, nothing fetched, nothing of a run taken for HTML."""

import json
from html.parser import HTMLParser

from bert_cli.tasks.look.curves import Panel, Picture
from bert_cli.tasks.look.page import page_of
from bert_cli.train.history import Run

LOSS = Picture("loss", "Loss", [Panel("masked-LM loss (nats)", "mlm_loss")])


class Reader(HTMLParser):
    """Tags that were opened and closed, addresses, and rows of tables as text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []
        self.rows: dict[str, list[str]] = {}
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        given = dict(attributes)
        self.addresses += [given[name] for name in ("src", "srcset", "href") if name in given]
        if tag not in ("meta", "img", "source", "wbr"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        if tag == "tr":
            self.cells = []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "tr" and self.cells:
            self.rows[self.cells[0]] = self.cells[1:]

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def page(runs, names, pictures=((LOSS, b"light", b"dark"),)) -> Reader:
    return Reader(page_of(runs, names, pictures, 5))


def test_a_page_holds_its_pictures_and_fetches_nothing(tmp_path, write_run):
    read = page([Run(write_run(tmp_path / "run", 5))], ["run"])
    assert read.open == []
    assert len(read.addresses) == 2
    assert all(address.startswith("data:image/png;base64,") for address in read.addresses)
    assert not read.seen & {"script", "link", "iframe"}


def test_a_page_is_light_or_dark_as_the_system_is(tmp_path, write_run):
    text = page_of([Run(write_run(tmp_path / "run", 5))], ["run"], [(LOSS, b"l", b"d")], 5)
    assert "color-scheme: light dark" in text
    assert text.count("prefers-color-scheme: dark") == 2  # the colours and the picture


def test_settings_that_differ_and_last_figures_are_tables_with_a_column_a_run(tmp_path, write_run):
    runs = [
        Run(write_run(tmp_path / "a", 10, saved=(10,))),
        Run(write_run(tmp_path / "b", 8, seed=2, rate=None)),
    ]
    rows = page(runs, ["a", "b"]).rows
    assert rows["seed"] == ["1", "2"]
    assert rows["rate"] == ["not set", "null"]
    assert "global_batch.replicas" not in rows
    assert rows["state"] == ["done", "killed"]
    assert rows["mlm loss, last"] == ["4.0000", "5.0000"]


def test_runs_of_the_same_settings_say_so_and_one_run_has_no_table_of_differences(
    tmp_path, write_run
):
    runs = [Run(write_run(tmp_path / name, 3)) for name in "ab"]
    assert "None: the runs have the same settings" in page_of(runs, ["a", "b"], [], 1)
    assert "Settings that differ" not in page_of(runs[:1], ["a"], [], 1)


def test_a_run_without_a_step_stands_in_the_tables(tmp_path, write_run):
    runs = [Run(write_run(tmp_path / "a", 3)), Run(write_run(tmp_path / "b", 0))]
    rows = page(runs, ["a", "b"]).rows
    assert rows["state"] == ["killed", "empty, no step yet"]
    assert rows["mlm loss, last"][1] == ""


def test_nothing_of_a_run_is_taken_for_html(tmp_path, write_run):
    bad = "<script>alert(1)</script>&\"'"
    run = Run(write_run(tmp_path / "run", 3, note=bad))
    other = Run(write_run(tmp_path / "other", 3, note="x"))
    read = page([run, other], [bad, "other"])
    assert read.seen & {"script"} == set()
    assert read.rows["note"] == [bad, "x"]
    assert json.dumps(run.settings)  # the page shows them all
