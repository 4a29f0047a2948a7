"""Models and a browser for the tests of prediction, export and pages."""

import os
import shutil

import pytest
from support.hf_models import Models, need


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Name -> folder of a random model of transformers with a tokenizer."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
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
