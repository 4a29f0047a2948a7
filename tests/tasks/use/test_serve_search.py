"""`bert serve` of an index: its requests over HTTP, and its page in Debian's Chromium."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest
from support.made_documents import lines, made_pdf
from support.pages import in_a_thread, open_page, served

from bert_cli import open_index
from bert_cli.cli import main

get, post = (partial(method, timeout=None) for method in (httpx2.get, httpx2.post))

# --- the requests to an index

QUESTION = "Which drink is hot in the morning?"
TEXTS = {
    "tea.txt": f"All about tea\n\nTea is made of the leaves of a bush. It keeps you awake. {QUESTION}\n",
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
    assert hits and str(index.parent) not in answer.text and answer.json()["missing"] == []
    about = get(f"{found}api/about").json()
    assert about.pop("passages") >= len(hits)
    assert about.pop("examples") == [QUESTION, "title", "Boats"]
    expected = {"task": "search", "name": "my.index", "has_meaning": True, "documents": 3}
    assert about == expected | {"folders": ["<b>dark", "sea"], "has_new_vectors": False}


def test_a_document_is_read_around_its_passage(index, found):
    (hit,) = open_index(index).ask("boats", 1, "words")
    rows = post(f"{found}api/read", json={"passage": hit.passage}).json()["hits"]
    assert " ".join(row["text"] for row in rows).split() == TEXTS["sea/boats.txt"].split()
    assert post(f"{found}api/read", json={"passage": 10**6}).json() == {"hits": []}


def test_the_file_of_a_passage_is_sent_to_be_read_or_to_be_saved(tmp_path):
    pages = [lines("Sails", "A sail needs wind."), lines("Masts", "A mast of spruce is light.")]
    (tmp_path / "boats.pdf").write_bytes(made_pdf(pages))
    (tmp_path / "evil.html").write_text("<title>wind</title><p>A script of the wind.</p>")
    (tmp_path / "two.txt").write_text("The wind of spring.\n\nA mast in the wind.\n")
    make = ["search", "make", str(tmp_path / "my.index"), str(tmp_path / "*.*")]
    assert main([*make, "--documents", "blank-lines"]) == 0
    for number in (1, 2):  # as paragraphs are named
        (tmp_path / f"two.txt:{number}").write_text("not indexed")
    with in_a_thread(tmp_path / "my.index") as address:
        hits = post(f"{address}api/search", json={"question": "wind"}).json()["hits"]
        of_names = {hit["document"].partition(":")[0]: hit for hit in hits}
        assert len({hit["document"] for hit in hits}) == 4 and len(of_names) == 3
        for hit in hits:
            answer = get(f"{address}api/file?passage={hit['passage']}")
            name = hit["document"].partition(":")[0]
            assert answer.content == (tmp_path / name).read_bytes()
            kind, place = answer.headers["content-type"], answer.headers["content-disposition"]
            shown = {"two.txt": "text/plain; charset=utf-8", "boats.pdf": "application/pdf"}
            assert place == f'{"inline" if name in shown else "attachment"}; filename="{name}"'
            assert kind == shown.get(name, "text/html; charset=utf-8")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert str(tmp_path) not in str(answer.headers)
        changed = tmp_path / "evil.html"
        changed.write_text(changed.read_text().upper())
        (tmp_path / "two.txt").unlink()
        (tmp_path / "boats.pdf").rename(tmp_path / "moved.pdf")
        (tmp_path / "boats.pdf").symlink_to(tmp_path / "moved.pdf")  # the same size and time
        for hit in of_names.values():
            answer = get(f"{address}api/file?passage={hit['passage']}")
            assert answer.status_code == 400
            problem = "its file is gone, or has changed since `bert search make`; run it again"
            assert answer.json()["error"] == f"passage: {problem}"
        gone = get(f"{address}api/file?passage={10**6}").json()["error"]
        assert gone == "passage: the index no longer has this passage; search again"
        evil = {"Host": "evil.example"}
        assert get(f"{address}api/file?passage=1", headers=evil).status_code == 421
        for number in ("x", "../../etc/passwd", str(10**6)):
            answer = get(f"{address}api/file?passage={number}")
            assert answer.status_code == 400 and "passage" in answer.json()["error"]


@pytest.mark.parametrize(
    ("name", "sent", "message"),
    [
        ("search", {"query": "a"}, "question: is missing; set it there\nquery: no such name; remove it"),
        ("search", {"question": "-coffee"}, "has no word; ask with a word"),
        ("search", {"question": "a", "folder": "seas"}, "('seas'): no document is in it; did you mean 'sea'?"),
        ("search", {"question": "a", "half": "luck"}, "half"),
        ("search", {"question": "a", "passage": 10**6}, "the index no longer has this passage; search again"),
        ("search", {"question": "a", "top": 0}, "top"),
        ("search", {"question": "?!"}, "has no word; ask with a word"),
        ("read", {"passage": "x"}, "passage: got 'x'"),
        ("read", {"passage": 2**70}, "passage"),
    ],
)  # fmt: skip
def test_a_wrong_search_is_answered_with_what_is_wrong(name, sent, message, found):
    answer = post(f"{found}api/{name}", json=sent)
    assert answer.status_code == 400 and message in answer.json()["error"]


def test_an_index_of_words_has_no_meaning_until_it_is_served_again(models, tmp_path):
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


def test_a_loopback_address_that_browsers_do_not_know_needs_its_token(index):
    with served(index, "--host", "127.0.0.2") as address:
        assert re.fullmatch(r"http://127.0.0.2:\d+/\?token=\S{22}", address)
        assert get(address).status_code == 200


# --- the page


def test_an_index_is_searched_by_keyboard_and_a_document_opens_beside(found, page):
    open_page(page, found)
    page.get_by_label("words").check()  # the model is random
    page.get_by_label("Search").focus()
    page.keyboard.type("tea")
    first = page.locator(".hit a").first
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
    assert page.locator(".hit a:focus").text_content() == "All about tea"
    page.keyboard.press("ArrowUp")
    assert page.locator("#question:focus").count() == 1
    page.route("**/api/read", lambda route: route.fulfill(json={"hits": []}))
    first.click()
    page.locator("#document p", has_text="no longer has this passage: search again").wait_for()


def test_the_switch_ranks_by_words_both_or_meaning_and_says_what_it_does(index, found, page):
    open_page(page, found)
    page.get_by_label("Search").fill("boats and leaves")
    page.locator(".hit").first.wait_for()
    orders = []
    for half, says in (("words", "in any of their forms"), ("meaning", "in any words")):
        with page.expect_response("**/api/search"):
            page.get_by_label(half).check()
        page.locator("#half", has_text=says).wait_for()
        hits = open_index(index).ask("boats and leaves", 20, half)
        orders.append([str(hit.passage) for hit in hits])
        page.locator(f".hit:nth-child({len(hits)}):last-child").wait_for()
        shown = [hit.get_attribute("data-passage") for hit in page.locator(".hit").all()]
        assert shown == orders[-1]
    assert orders[0] != orders[1]


def test_an_answer_of_a_pdf_shows_its_page(tmp_path, page):
    pages = [lines("Sails", "A sail needs wind."), lines("Masts", "A mast of spruce is light.")]
    (tmp_path / "boats.pdf").write_bytes(made_pdf(pages))
    assert main(["search", "make", str(tmp_path / "my.index"), str(tmp_path / "boats.pdf")]) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        open_page(page, address)
        page.get_by_label("Search").fill("mast of spruce")
        page.locator(".hit .faint", has_text="boats.pdf, page 2").wait_for()
        page.locator(".hit a").first.click()
        page.locator("#document .here").wait_for()
        link = page.locator("#document header a").get_attribute("href")
        assert link.endswith("#page=2")
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
    assert page.locator(".hit a").all_text_contents() == ["Boats"]
    asked = {"question": "leaves", "folder": "sea/", "half": None if half == "both" else half}
    titles = [hit["title"] for hit in post(f"{found}api/search", json=asked).json()["hits"]]
    assert titles == ([] if half == "words" else ["Boats"])


def test_a_hostile_document_is_shown_as_text(found, page):
    open_page(page, found)
    page.get_by_label("Search").fill("swims alert dives")
    hit = page.locator(".hit").first
    text = hit.text_content()
    assert "<b>dark/evil.txt" in text and "<img src=x onerror=alert(1)> title" in text
    hit.locator("a").click()
    shown = "The <script>alert(2)</script> swims &amp; 😀 dives."
    page.locator("#document", has_text=shown).wait_for()
    marks = page.locator("#document .here mark").all_text_contents()
    assert {"swims", "dives"} <= {*marks}  # after an emoji too
    assert page.locator("img, script").count() == 1  # its own


def test_the_question_and_the_open_document_stand_in_the_address(found, page):
    open_page(page, f"{found}?half=words")
    with page.expect_response("**/api/search"):
        page.get_by_role("button", name=QUESTION).click()
    link = page.locator(".hit a").first
    target = link.evaluate("link => link.href")  # what another tab opens
    link.click()
    page.locator("#document .here mark").first.wait_for()
    address = page.url
    assert target == address
    assert re.search(r"\?half=words&q=Which\+drink.*&passage=\d+$", address)
    page.go_back()
    page.locator("#document").wait_for(state="hidden")
    assert page.locator(".hit a:focus").count() == 1
    page.go_forward()
    page.locator("#document .here").wait_for()
    page.get_by_role("button", name="close").click()
    page.wait_for_url(address.rpartition("&")[0])
    page.go_back()  # to the page before the question
    page.get_by_role("button", name=QUESTION).wait_for()
    page.goto(f"{found}?q=boats&half=words&folder=sea")
    page.locator(".hit a", has_text="Boats").click()
    page.reload()
    page.locator("#document .here mark", has_text="boats").first.wait_for()
    assert page.get_by_label("Folder").input_value() == "sea"
    assert page.get_by_label("words").is_checked()
    assert page.get_by_label("Search").input_value() == "boats"


def test_a_passage_is_selected_and_copied(index, found, page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(f"{found}?q=leaves&half=words")
    text = page.locator(".hit .text").first
    text.dblclick()
    assert page.evaluate("getSelection().toString()").strip()
    assert page.locator("#document").is_hidden()
    page.get_by_role("button", name="copy the passage").first.click()
    page.get_by_text("copied", exact=True).wait_for()
    (hit,) = open_index(index).ask("leaves", 1, "words")
    assert page.evaluate("navigator.clipboard.readText()") == hit.text
    page.evaluate(
        "() => { navigator.clipboard.writeText = () => { throw Error(); }; }"
    )  # as without https
    page.evaluate(
        "window.copied = ''; addEventListener('copy', () => copied = getSelection() + '')"
    )
    page.get_by_role("button", name="copy the passage").first.click()
    assert page.evaluate("copied").split() == hit.text.split()


LACKING = "No passage has the words “cooked”, “rice”"
UNLIKELY = ", so perhaps nothing fits."
NEAREST = "No passage that was found has a word of the question."
OTHER = ["Nothing fits.", "Try both or meaning, which find"]


@pytest.mark.parametrize(
    ("question", "half", "expected"),
    [
        ("leaves, rice?", "both", [f"No passage has the word “rice”{UNLIKELY}"]),
        ("cooked rice", "words", [f"{LACKING}.", *OTHER]),
        ("cooked rice", "both", [f"{LACKING}{UNLIKELY}", NEAREST]),
        ("leaves", "words", []),
    ],
)
def test_words_that_no_passage_has_are_named(question, half, expected, found, page):
    page.goto(f"{found}?q={question}&half={half}")
    page.locator("#result ol").wait_for(state="attached")
    shown = page.locator("#result > p").all_text_contents()
    assert len(shown) == len(expected)
    assert all(map(str.startswith, shown, expected))


def read_to(page, place: int, text: str) -> None:
    """Scroll the document until it has a text."""
    script = """([place, text]) => {
        const pane = document.getElementById("document");
        pane.scrollTop = place;
        return pane.textContent.includes(text);
    }"""
    page.wait_for_function(script, arg=[place, text])


def test_a_long_text_has_two_hits_and_is_read_whole_with_its_indents(tmp_path, page):
    rows = (
        f"  {n}. Row {n} of it{', odd' * (n % 40 == 34)}\n\n        has   its   indent {n % 7}, no more.\n"
        for n in range(2000)
    )
    text = "THE TABLE\n\n" + "\n".join(rows)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/long.txt").write_text(text)
    (tmp_path / "texts/short.txt").write_text("Another odd row.\n")
    assert main(["search", "make", str(tmp_path / "my.index"), str(tmp_path / "texts")]) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        page.goto(f"{address}?q=odd row 1234")
        more = page.locator("li.more", has_text=re.compile(r"^\d+ more in THE TABLE"))
        more.wait_for()
        names = page.locator(".hit:not(.next) .faint").all_text_contents()
        assert sorted(names) == ["long.txt", "short.txt"] and page.locator(".hit").count() == 3
        size = 3 + int((more.text_content() or "").split()[0])
        more.get_by_role("button").click()
        more.wait_for(state="detached")
        assert page.locator(".hit").count() == size
        page.reload()  # the address has them too
        page.locator(".hit").nth(size - 1).wait_for()
        assert page.locator(".hit").count() == size
        page.go_back()
        more.wait_for()
        assert page.locator(".hit").count() == 3
        page.locator(".hit a", has_text="THE TABLE").first.click()
        part = page.locator("#document.plain .here")
        part.wait_for()
        assert "  1234. Row 1234 of it, odd\n\n        has   its   indent" in (
            part.text_content() or ""
        )
        assert {"1234", "odd"} <= {*part.locator("mark").all_text_contents()}
        read_to(page, 0, "THE TABLE\n")
        parts = page.locator("#document p")
        assert "Row 1999" not in "".join(parts.all_text_contents())
        read_to(page, 10**9, "Row 1999")
        assert "".join(parts.all_text_contents()) == text
        link = page.get_by_role("link", name="plain file").get_attribute("href")
        assert get(f"{address}{link}").text == text


def test_documents_of_one_name_have_their_passages_apart(tmp_path, page):
    for name in "ab":
        rows = (
            f"Row {n} of {name} is odd, {'so that it is long, ' * 40}{n}.\n\n" for n in range(4)
        )
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(f"Title {name}\n\n{''.join(rows)}")
    make = ["search", "make", tmp_path / "my.index", tmp_path / "a", tmp_path / "b"]
    assert main([*map(str, make)]) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        page.goto(f"{address}?q=odd")
        more = page.locator("li.more", has_text=" more in Title b")
        more.wait_for()
        titles = page.locator(".hit a").all_text_contents()
        assert sorted(titles) == ["Title a", "Title a", "Title b", "Title b"]
        more.get_by_role("button").click()
        more.wait_for(state="detached")
        titles = page.locator(".hit a").all_text_contents()
        assert (titles.count("Title a"), titles.count("Title b")) == (2, 4)


def test_a_long_page_is_read_whole_in_its_passages(tmp_path, page):
    rows = [
        f"Paragraph {n} has some words of its own, {'so that it is long, ' * 20}{n}."
        for n in range(300)
    ]
    text = "".join(f"<p>{row}</p>" for row in rows)
    (tmp_path / "long.html").write_text(f"<html><body><h1>Words</h1>{text}</body></html>")
    assert main(["search", "make", str(tmp_path / "my.index"), str(tmp_path / "long.html")]) == 0
    with in_a_thread(tmp_path / "my.index") as address:
        page.goto(f"{address}?q=paragraph 150")
        page.locator(".hit a").first.click()
        page.locator("#document:not(.plain) .here", has_text="Paragraph 150 has").wait_for()
        read_to(page, 0, rows[0])
        read_to(page, 10**9, rows[-1])
        shown = " ".join(page.locator("#document p").all_text_contents())
        assert " ".join(shown.split()).endswith(" ".join(rows))
        assert page.get_by_role("link", name="file", exact=True).count() == 1


def test_old_hits_are_dimmed_while_a_slow_answer_comes(found, page):
    page.goto(f"{found}?q=boats&half=words")
    page.locator(".hit").first.wait_for()
    waiting = []
    page.route("**/api/search", lambda route: waiting.append(route))
    page.get_by_label("Search").fill("tea")
    page.locator("#result.old .hit", has_text="boats").first.wait_for()
    page.get_by_text("Computing ...").wait_for()
    waiting[0].continue_()
    page.locator("#result:not(.old) .hit", has_text="Tea is").first.wait_for()


def test_back_while_one_types_shows_the_last_finished_question(found, page):
    page.goto(f"{found}?half=words")
    search = page.get_by_label("Search")
    for question in ("boats", "tea"):
        search.fill(question)
        search.press("Enter")
        page.wait_for_url(f"**q={question}*")
    waiting = []
    page.route(
        "**/api/search", lambda route: route.continue_() if waiting else waiting.append(route)
    )
    search.fill("tea or")
    page.get_by_text("Computing ...").wait_for()
    page.evaluate("history.back()")
    waiting[0].continue_()
    page.locator("#result:not(.old) .hit", has_text="boats").first.wait_for()
    assert search.input_value() == "boats" and "q=boats" in page.url
    page.go_forward()
    page.locator(".hit", has_text="Tea is").first.wait_for()
    assert search.input_value() == "tea"
