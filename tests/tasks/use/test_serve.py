"""`bert serve`: its requests over HTTP, to processes and to threads, and its page in Debian's Chromium."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from threading import Thread

import httpx2
import numpy as np
import pytest
import uvicorn
from support.answers import near
from support.bert import start_bert
from support.hf_models import change_weights, need
from support.made_documents import lines, made_pdf

from bert_cli import open_index
from bert_cli.cli import main
from bert_cli.config.use import ServeSettings
from bert_cli.tasks.use import page as over_http
from bert_cli.tasks.use import requests

LIMIT = 100_000
# The first answer waits for a model that is traced, which takes long on a busy machine.
get, post = (partial(method, timeout=None) for method in (httpx2.get, httpx2.post))
CONTEXT = "😀 The cats sat on the mat. We like to eat in Paris."
ROWS = {
    "masked": {"text": "The cat [MASK] on the [MASK]."},
    "text": {"text": "the cat", "second": "a dog"},
    "several": {"text": "the cat"},
    "token": {"text": "Unknown cats sat in paris 😀"},
    "bare": {"text": "the cat"},
    "question": {"question": "Where do we eat?", "context": CONTEXT},
}


@contextmanager
def served(model: Path, *words: object, log: Path | None = None) -> Iterator[str]:
    """Start `bert serve` and yield its address; it must end with Ctrl-C without an error."""
    with open(log or os.devnull, "wb") as stderr:
        words = ("serve", model, "--port", 0, *words)
        with start_bert(*words, stdout=subprocess.PIPE, stderr=stderr) as process:
            assert process.stdout is not None
            try:
                line = process.stdout.readline()
                assert line.startswith("open http://"), line
                yield line.split()[1]
            finally:
                process.send_signal(signal.SIGINT)
                code = process.wait()
    assert code == 0


@contextmanager
def in_a_thread(path: Path, **settings: object) -> Iterator[str]:
    """Serve a model or an index in a thread of this process, and yield its address."""
    opening = requests.open_index if path.is_file() else requests.open_model
    app = over_http.build_app(opening(ServeSettings(path=str(path), **settings)), None)
    # Its logging would close the stream of another library's, which is that of pytest.
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none"))
    with over_http.listen(None, 0) as listener:
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def address_of(models) -> Iterator[Callable[[str], str]]:
    """A function that serves a model by its name, once, and returns the address."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(in_a_thread(models[name])))


def asked(address: str, row: dict[str, str]) -> dict:
    answer = post(f"{address}api/predict", json=row)
    assert answer.status_code == 200
    return answer.json()


# --- requests


@pytest.mark.parametrize("name", ROWS)
def test_a_request_is_answered_as_bert_predict_answers(name, models, address_of, tmp_path, capsys):
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(ROWS[name]))
    words = ["predict", str(models[name]), "--input", str(path), "--engine", "tensorflow"]
    assert main(words) == 0
    expected = json.loads(capsys.readouterr().out)
    assert asked(address_of(name), ROWS[name]) == near(expected)
    assert get(f"{address_of(name)}api/about").json()["name"] == models[name].name


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"{", 400, "is not a JSON object: send one"),
        (b"[" * 50_000, 400, "is not a JSON object"),
        (b"\xff\xfe", 400, "is not a JSON object"),
        (b'["the cat"]', 400, "is not a JSON object"),
        (b'{"txt": "the cat"}', 400, "text: has no column 'text'"),
        (b'{"text": 3}', 400, "text: 'text' is not a string; write it as a string"),
        (b'{"text": " "}', 400, "text: is empty; write a text"),
        (b'{"text": "\\ud83d"}', 400, "text: has an unpaired surrogate"),
        (b'{"text": "a", "question": "b"}', 400, "'question' is not read by task text-classification"),
        (b'{"text": "%s"}' % (b"a" * LIMIT), 413, "send at most 100,000 bytes"),
        (b"a" * 10**7, 413, "send at most 100,000 bytes"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_answered_with_what_is_wrong(sent, status, message, address_of):
    answer = post(f"{address_of('text')}api/predict", content=sent)
    assert answer.status_code == status and message in answer.json()["error"]


def test_other_addresses_and_methods_are_answered_in_json(address_of):
    labels = address_of("text")
    assert post(f"{labels}api/nothing", json={}).status_code == 404
    answer = get(f"{labels}api/predict")
    assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "localhost.evil.example"}, 421),
        ({"Host": "["}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "localhost:8321", "Origin": "http://localhost:8321"}, 200),
        ({"Host": "[::1]:8321"}, 200),
    ],
)
def test_another_page_and_a_name_that_points_here_cannot_ask(headers, status, address_of):
    labels = address_of("text")
    assert post(f"{labels}api/predict", json=ROWS["several"], headers=headers).status_code == status
    page = get(labels, headers=headers)
    assert page.status_code == status
    assert "frame-ancestors 'none'" in page.headers["Content-Security-Policy"]


@pytest.mark.slow
def test_a_page_for_other_machines_needs_its_token(models, tmp_path):
    log = tmp_path / "log"
    with served(models["text"], "--host", "0.0.0.0", log=log) as address:
        host, port, token = re.fullmatch(r"http://(.*):(\d+)/\?token=(\S{22})", address).groups()
        assert host == socket.gethostname()
        page = f"http://127.0.0.1:{port}/"
        queries = {"": 401, "?token=": 401, "?token=é": 401, f"?token={token}": 200}
        for query, status in queries.items():
            assert get(f"{page}{query}").status_code == status
            assert post(f"{page}api/predict{query}", json=ROWS["several"]).status_code == status
    assert "warning: host (0.0.0.0): everyone on the network" in log.read_text()


def test_a_failure_is_told_in_the_terminal_and_no_answer_has_a_path(models, tmp_path):
    changes = {"classifier.weight": lambda values: values * 0 + 3e38}
    model = change_weights(models["text"], tmp_path / "model", changes)
    with served(model, log=tmp_path / "log") as address:
        answer = post(f"{address}api/predict", json={"text": "the cat"})
        about = get(f"{address}api/about")
    assert answer.status_code == 500
    assert answer.json() == {"error": "the answer failed: see what bert serve printed"}
    assert "the model's outputs are not finite; check its weights" in (tmp_path / "log").read_text()
    assert str(tmp_path) not in about.text


def test_a_taken_port_and_an_address_of_another_machine_are_refused(models, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        in_use = f"port ({port}): Address already in use; choose another, such as --port 0"
        for flag, value, message in (
            ("--port", port, in_use),
            ("--host", "192.0.2.1", "(192.0.2.1), port (8321): Cannot assign requested address"),
            ("--host", "a..b", "host (a..b), port (8321): is not a host name; choose"),
        ):
            assert main(["serve", str(models["text"]), flag, value]) == 2
            assert message in capsys.readouterr().err


def test_without_its_extra_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bert_cli.tasks.use.page", raising=False)
    monkeypatch.delattr("bert_cli.tasks.use.page")
    assert main(["serve", "model"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"bert: bert serve: needs the extra 'serve'; pip install .*\n", error)


# --- the requests to an index

TEXTS = {
    "tea.txt": "All about tea\n\nTea is made of the leaves of a bush. It keeps you awake.\n",
    "sea/boats.txt": "Boats\n\nThe boats in the desert wait for rain. Nobody sails them.\n",
    "<b>dark/evil.txt": "<img src=x onerror=alert(1)> title\n\nThe <script>alert(2)</script> swims &amp; 😀 dives.\n",
}
TEA = "Tea is made of the leaves"


@pytest.fixture(scope="module")
def index(tmp_path_factory, models) -> Path:
    home = tmp_path_factory.mktemp("index")
    for folder in ("sea", "<b>dark"):
        (home / "texts" / folder).mkdir(parents=True)
    for name, text in TEXTS.items():
        (home / "texts" / name).write_text(text, encoding="utf-8")
    words = ["search", "make", home / "my.index", home / "texts", "--model", models["bare"]]
    assert main([*map(str, words)]) == 0
    return home / "my.index"


@pytest.fixture(scope="module")
def found(index) -> Iterator[str]:
    with in_a_thread(index) as address:
        yield address


@pytest.mark.parametrize("half", [None, "words", "meaning"])
def test_a_search_is_answered_as_open_index_answers(half, index, found):
    answer = post(f"{found}api/search", json={"question": "leaves of tea", "half": half})
    hits = answer.json()["hits"]
    found_here = open_index(index).ask("leaves of tea", 10, half)
    expected = json.loads(json.dumps([hit._asdict() for hit in found_here]))
    left_out = {"file", "page"}  # a path, and what a text lacks
    assert hits == [{n: v for n, v in hit.items() if n not in left_out} for hit in expected]
    assert hits and str(index.parent) not in answer.text
    about = get(f"{found}api/about").json()
    assert about.pop("passages") >= len(hits)
    expected = {"task": "search", "name": "my.index", "has_meaning": True, "documents": 3}
    assert about == expected | {"folders": ["<b>dark", "sea"], "has_new_vectors": False}


def test_a_document_is_read_around_its_passage(index, found):
    (hit,) = open_index(index).ask("boats", 1, "words")
    rows = post(f"{found}api/read", json={"passage": hit.passage}).json()["hits"]
    assert " ".join(row["text"] for row in rows).split() == TEXTS["sea/boats.txt"].split()
    assert post(f"{found}api/read", json={"passage": 10**6}).json() == {"hits": []}


@pytest.mark.parametrize(
    ("name", "sent", "message"),
    [
        ("search", {"query": "a"}, "question: is missing; set it there\nquery: no such name; remove it"),
        ("search", {"question": "-coffee"}, "has no word; ask with a word"),
        ("search", {"question": "a", "folder": "seas"}, "('seas'): no document is in it; did you mean 'sea'?"),
        ("search", {"question": "a", "half": "luck"}, "half"),
        ("search", {"question": "a", "top": 0}, "top"),
        ("search", {"question": "?!"}, "has no word; ask with a word"),
        ("read", {"passage": "x"}, "passage: got 'x'"),
        ("read", {"passage": 2**70}, "passage"),
    ],
)  # fmt: skip
def test_a_wrong_search_is_answered_with_what_is_wrong(name, sent, message, found):
    answer = post(f"{found}api/{name}", json=sent)
    assert answer.status_code == 400 and message in answer.json()["error"]


def test_an_index_of_words_has_no_meaning_until_it_is_served_again(models, tmp_path, capsys):
    (tmp_path / "tea.txt").write_text(TEXTS["tea.txt"])
    make = ["search", "make", str(tmp_path / "my.index"), str(tmp_path / "tea.txt")]
    assert main(make) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        assert not get(f"{address}api/about").json()["has_meaning"]
        answer = post(f"{address}api/search", json={"question": "tea", "half": "meaning"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error.startswith("meaning: the index has no vectors of all passages by its model")
        assert str(tmp_path) not in error
        (tmp_path / "sea.txt").write_text(TEXTS["sea/boats.txt"])
        assert main([*make, str(tmp_path / "sea.txt"), "--model", str(models["bare"])]) == 0
        about = get(f"{address}api/about").json()
        assert about["documents"] == 2 and about["has_new_vectors"] and not about["has_meaning"]
    (tmp_path / "no.index").write_text("no index")
    assert main(["serve", str(tmp_path / "no.index"), "--port", "0"]) == 3


def test_a_loopback_address_that_browsers_do_not_know_needs_its_token(index):
    with served(index, "--host", "127.0.0.2") as address:
        assert re.fullmatch(r"http://127.0.0.2:\d+/\?token=\S{22}", address)
        assert get(address).status_code == 200


# --- the page


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("the page is tried in Chromium: apt-get install chromium")
    need("playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
        browser = playwright.chromium.launch(executable_path=program, args=options)
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    """A page of 360 pixels, the width of a phone, which fails at requests to others and at errors of scripts."""
    page = browser.new_page(viewport={"width": 360, "height": 640})
    page.set_default_timeout(0)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.on("pageerror", lambda error: seen.append(f"error {error}"))
    refused = "Failed to load resource"  # the page tells it too
    page.on("console", lambda line: line.text.startswith(refused) or seen.append(line.text))
    page.on("dialog", lambda dialog: seen.append(f"error {dialog.message}"))
    yield page
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    assert [one for one in seen if not one.startswith(("http://127.0.0.1:", "data:"))] == []
    assert wide <= 360


def open_page(page, address: str) -> None:
    """Open a page and wait until its first field has the focus."""
    page.goto(address)
    page.locator("#form :focus").wait_for()


def bars_of(page) -> list[tuple[str, str]]:
    rows = page.locator("#result .bar")
    rows.first.wait_for()
    return [tuple(row.locator("span").all_text_contents()) for row in rows.all()]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def test_masks_are_filled_as_one_types(address_of, page):
    address = address_of("masked")
    open_page(page, address)
    page.keyboard.type("The cat ")  # the field has the focus
    page.get_by_text("Put [MASK] in place of a word.").wait_for()
    page.get_by_role("button", name="insert [MASK]").click()
    page.keyboard.type(" on the mat")
    page.locator("#result h2").wait_for()
    text = page.locator("#text").input_value()
    assert text == "The cat [MASK] on the mat"
    (words,) = asked(address, {"text": text})["masks"]
    assert bars_of(page) == [(word["word"], percent(word["probability"])) for word in words]
    # A wider bar is a more probable word.
    widths = [bar.bounding_box()["width"] for bar in page.locator(".bar i").all()]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]


def test_labels_are_shown_with_bars_and_hostile_ones_as_text(models, tmp_path, page):
    hostile = "<img src=x onerror=alert(1)>"
    folder = shutil.copytree(models["text"], tmp_path / hostile.replace("/", ""))
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": hostile, "1": "<script>alert(2)</script>", "2": "__proto__"}}
    (folder / "config.json").write_text(json.dumps(config))
    with in_a_thread(folder) as address:
        open_page(page, address)
        page.get_by_label("Text", exact=True).fill(hostile)
        answer = asked(address, {"text": hostile})
        assert dict(bars_of(page)) == {n: percent(p) for n, p in answer["probabilities"].items()}
        assert page.locator("#result h2").text_content() == answer["label"]
        assert page.title() == page.locator("h1").text_content() == hostile
        page.get_by_label("Second text").fill("a dog")
        best = percent(asked(address, {"text": hostile, "second": "a dog"})["probability"])
        page.locator("#result .bar span", has_text=best).first.wait_for()
        assert page.locator("img, script").count() == 1  # its own


@pytest.mark.parametrize(("name", "level"), [("several", None), ("text", 0.99)])
def test_the_page_has_several_labels_or_none(name, level, models, page):
    with in_a_thread(models[name], none_below=level) as address:
        open_page(page, address)
        page.get_by_label("Text", exact=True).fill("the cat")
        answer = asked(address, {"text": "the cat"})
        assert dict(bars_of(page)) == {n: percent(p) for n, p in answer["probabilities"].items()}
        label = "none" if level else ", ".join(answer["labels"])
        assert page.locator("#result h2").text_content() == label != ""


def test_the_entities_of_a_text_are_marked(models, page):
    # After an emoji, which is one character in Python and two units in a browser.
    text = "😀 Unknown cats sat in paris , france 😀"
    changes = {"classifier.bias": lambda bias: bias + np.float32((0, 9, 0, 0, 0))}
    folder = change_weights(models["token"], models["token"].with_name("persons"), changes)
    with in_a_thread(folder) as address:
        open_page(page, address)
        page.keyboard.type(text)
        marks = page.locator("#result mark")
        marks.first.wait_for()
        entities = asked(address, {"text": text})["entities"]
        assert len(entities) > 3
        assert marks.all_text_contents() == [one["text"] + one["type"] for one in entities]


def test_the_answer_is_marked_in_its_context(address_of, page):
    address = address_of("question")
    open_page(page, address)
    page.keyboard.type("Where do we eat?")
    page.keyboard.press("Tab")
    page.keyboard.type(CONTEXT)
    ((answer, _),) = bars_of(page)
    expected = asked(address, ROWS["question"])["answer"]
    assert page.locator("#result mark").text_content() == answer == expected
    assert page.locator("#result .passage").text_content() == CONTEXT


def test_texts_are_ranked_by_similarity(address_of, page):
    open_page(page, address_of("bare"))
    page.keyboard.type("the cat")
    page.get_by_label("Texts to compare with").fill("a dog sat on\nthe cat\nin france")
    best, *others = bars_of(page)
    assert best == ("the cat", "1.000") and len(others) == 2


def test_an_index_is_searched_by_keyboard_and_a_document_opens_beside(found, page):
    open_page(page, found)
    page.get_by_label("words").check()  # the model is random
    page.get_by_label("Search").focus()
    page.keyboard.type("tea")
    first = page.locator(".hit b").first
    first.wait_for()
    assert first.text_content() == "All about tea"
    # One event, so that only the last answer has the mark: a later one would close the document.
    page.keyboard.insert_text(" leaves")
    page.locator(".hit mark", has_text="leaves").wait_for()  # as one types
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.locator("#document .here", has_text=TEA).wait_for()
    shown = " ".join(page.locator("#document p").all_text_contents())
    assert shown.split() == TEXTS["tea.txt"].split()
    page.keyboard.press("Escape")
    assert page.locator("#document").is_hidden()
    assert page.locator(".hit:focus b").text_content() == "All about tea"
    page.keyboard.press("ArrowUp")
    assert page.locator("#question:focus").count() == 1
    page.route("**/api/read", lambda route: route.fulfill(json={"hits": []}))
    first.click()
    page.locator("#document p", has_text="no longer has this passage: search again").wait_for()


def test_the_switch_ranks_by_words_both_or_meaning(index, found, page):
    open_page(page, found)
    page.get_by_label("Search").fill("boats and leaves")
    page.locator(".hit").first.wait_for()
    for half in ("words", "meaning"):
        with page.expect_response("**/api/search"):
            page.get_by_label(half).check()
        scores = [f"{hit.score:.2f}" for hit in open_index(index).ask("boats and leaves", 10, half)]
        shown = page.locator(".hit .faint")
        shown.last.get_by_text(scores[-1]).wait_for()
        assert [text.rpartition(" ")[2] for text in shown.all_text_contents()] == scores


def test_an_answer_of_a_pdf_shows_its_page(tmp_path, page):
    pages = [lines("Sails", "A sail needs wind."), lines("Masts", "A mast of spruce is light.")]
    (tmp_path / "boats.pdf").write_bytes(made_pdf(pages))
    assert main(["search", "make", str(tmp_path / "my.index"), str(tmp_path / "boats.pdf")]) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        open_page(page, address)
        page.get_by_label("Search").fill("mast of spruce")
        page.locator(".hit .faint", has_text="boats.pdf, page 2, score").wait_for()
        about = get(f"{address}api/about").json() | {"has_new_vectors": True}
        page.route("**/api/about", lambda route: route.fulfill(json=about))
        open_page(page, address)
        page.locator("#about", has_text="start bert serve again to use them").wait_for()


@pytest.mark.parametrize("half", ["words", "both", "meaning"])
def test_a_folder_alone_is_searched(half, index, found, page):
    open_page(page, found)
    page.get_by_label(half).check()
    page.get_by_label("Folder").select_option("sea")
    page.get_by_label("Search").fill("leaves of boats")
    page.locator(".hit").first.wait_for()
    assert page.locator(".hit b").all_text_contents() == ["Boats"]
    asked = {"question": "leaves", "folder": "sea/", "half": None if half == "both" else half}
    titles = [hit["title"] for hit in post(f"{found}api/search", json=asked).json()["hits"]]
    assert titles == ([] if half == "words" else ["Boats"])


def test_a_hostile_document_is_shown_as_text(found, page):
    open_page(page, found)
    page.get_by_label("Search").fill("swims alert dives")
    hit = page.locator(".hit").first
    text = hit.text_content()
    assert "<b>dark/evil.txt" in text and "<img src=x onerror=alert(1)> title" in text
    hit.click()
    shown = "The <script>alert(2)</script> swims &amp; 😀 dives."
    page.locator("#document", has_text=shown).wait_for()
    marks = page.locator("#document .here mark").all_text_contents()
    assert {"swims", "dives"} <= {*marks}  # after an emoji too
    assert page.locator("img, script").count() == 1  # its own


def test_a_server_that_fails_or_refuses_is_told_on_the_page(address_of, page):
    open_page(page, address_of("text"))
    page.route("**/api/predict", lambda route: route.abort())
    page.keyboard.type("the cat")
    page.locator("#status.wrong").wait_for()
    page.unroute("**/api/predict")
    page.keyboard.type(" sat")
    assert len(bars_of(page)) == 3 and page.locator("#status.wrong").count() == 0
    page.get_by_label("Text", exact=True).fill("a" * LIMIT)
    page.get_by_text("the request is too large: send at most 100,000 bytes").wait_for()


@pytest.mark.slow
def test_the_page_is_dark_where_the_system_is(address_of, page):
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.goto(address_of("text"))
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
