"""A real Chromium for tests of pages, where the machine has one."""

import shutil

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    """Chromium without a screen. INVARIANT: of one module, in which nothing else runs an event loop in this thread."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"pages are NOT TESTED: none of {', '.join(NAMES)} is here. Install chromium-headless-shell.")
    from playwright.sync_api import sync_playwright  # here, since conftest.py imports this file for every test

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """A function that opens an address, and fails the test at its end where the page had an error."""
    errors, pages = [], []

    def open_at(address, width=1280, height=900, **options):
        page = browser.new_page(viewport={"width": width, "height": height}, **options)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        pages.append(page)
        page.goto(address)
        page.wait_for_selector("main *", state="attached")
        return page

    yield open_at
    for page in pages:
        page.close()
    assert errors == [], errors
