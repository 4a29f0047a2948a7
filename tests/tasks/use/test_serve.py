"""`bert serve`: its requests over HTTP, to processes and to threads, and its page in Debian's Chromium."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, partial

import httpx2
import numpy as np
import pytest
from support.answers import near
from support.hf_models import change_weights
from support.pages import in_a_thread, open_page, served

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
def test_a_request_is_answered_as_bert_predict_answers(name, models, address_of, tmp_path, bert):
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(ROWS[name]))
    words = ["predict", str(models[name]), "--input", str(path), "--engine", "tensorflow"]
    expected = json.loads(bert(*words).out)
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
        ({"Host": "localhost:8321", "Origin": "http://no.localhost:8321"}, 403),
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


def test_a_taken_port_is_refused(models, bert):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        in_use = f"port ({port}): Address already in use; choose another, such as --port 0"
        assert in_use in bert("serve", models["text"], "--port", port, code=2).err


def test_without_its_extra_the_command_names_it(monkeypatch, bert):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bert_cli.tasks.use.page", raising=False)
    monkeypatch.delattr("bert_cli.tasks.use.page")
    error = bert("serve", "model", code=2).err
    assert re.fullmatch(r"bert: bert serve: needs the extra 'serve'; pip install .*\n", error)


# --- the page


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


@pytest.mark.parametrize(
    ("texts", "label"), [(0, "Second text, for a model of pairs"), (1, None), (2, "Second text")]
)
def test_a_second_text_is_asked_for_where_the_model_may_take_pairs(texts, label, address_of, page):
    address = address_of("text")
    about = get(f"{address}api/about").json()
    assert about["texts"] == 0  # of a model without its run
    page.route("**/api/about", lambda route: route.fulfill(json=about | {"texts": texts}))
    open_page(page, address)
    labels = page.locator("#form label").all_text_contents()
    assert labels == ["Text", *([label] if label else [])]
    page.keyboard.type("the cat")
    assert len(bars_of(page)) == 3


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
