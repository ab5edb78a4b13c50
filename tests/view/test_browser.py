"""The page in a real browser: Debian's chromium, driven by playwright. `make test-browser` installs both.

Every test also checks that the page logged no error and asked nobody but its server.
"""

import json
import os
import shutil

import pytest

from support.viewing import HOSTILE, WORDS, made_group, make_hostile_run, make_run
from turnwise.inspect.attempts import AttemptKey
from turnwise.runs.archive import write_step
from turnwise.view import watched_run
from turnwise.view.server import ViewServer
from turnwise.view.single_file import attempt_file, step_file
from turnwise.view.watched_run import WatchedRuns

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-browser does")
expect = playwright.expect
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")]
PATIENCE = 120_000
"""Milliseconds; machines are shared."""
PHONE = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def browser():
    expect.set_options(timeout=PATIENCE)
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=arguments, timeout=PATIENCE)
        yield chromium
        chromium.close()


class Visitor:
    """A page of a browser that remembers what it logged and whom it asked."""

    def __init__(self, browser, **how):
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.errors, self.requests = [], []
        self.page.on(
            "console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text)
        )
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def left(self, *allowed):
        """Requests to other places."""
        return [url for url in self.requests if not url.startswith((*allowed, "data:"))]


@pytest.fixture
def visit(browser):
    visitors = []

    def begin(**how):
        visitors.append(Visitor(browser, **how))
        return visitors[-1]

    yield begin
    for visitor in visitors:
        visitor.context.close()


@pytest.fixture
def served(tmp_path):
    """The address of a page over a finished run."""
    make_run(tmp_path / "one")
    with WatchedRuns.open([tmp_path / "one"]) as runs, ViewServer(runs) as server:
        yield server.url


def keys(page):
    page.locator("tbody tr").first.wait_for()
    return page.eval_on_selector_all("tbody tr", "rows => rows.map(row => row.dataset.key)")


def test_from_the_curves_to_a_token(served, visit):
    visitor = visit()
    page = visitor.page
    page.goto(served)
    expect(page.locator("figure.chart canvas")).to_have_count(3)
    expect(page.locator("figure[data-metric=success]")).to_contain_text("0.3")
    page.get_by_role("link", name="Attempts").click()
    expect(page.locator("tbody tr")).to_have_count(21)
    page.get_by_label("any status").select_option("too_long")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.get_by_label("any status").select_option("")
    page.get_by_label("any kind").select_option("train")
    page.get_by_role("button", name="reward").click()
    expect(page.locator("tbody tr").first).to_have_attribute("data-key", "train/3/0/0")
    page.get_by_role("button", name="reward").click()
    expect(page.locator("tbody tr").first).to_contain_text("too long")
    assert "order=reward" in page.url
    page.goto(served + "#/attempts/one?kind=train&order=reward")
    expect(page.locator("tbody tr").first).to_have_attribute("data-key", "train/3/0/0")
    page.locator("tbody tr").first.click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".call")).to_contain_text("get")
    expect(page.locator(".waterfall .row")).to_have_count(2)
    page.get_by_role("tab", name="tokens").click()
    page.locator('[data-token="0.1"]').hover()
    card = page.locator(".card")
    expect(card).to_contain_text("amber")
    expect(card).to_contain_text("-2")
    expect(card).to_contain_text("13.5 %")
    blue = page.locator('[data-token="0.0"]').evaluate("token => getComputedStyle(token).backgroundColor")
    page.get_by_role("button", name="logprob").click()
    other = page.locator('[data-token="0.0"]').evaluate("token => getComputedStyle(token).backgroundColor")
    assert blue != other
    assert visitor.errors == []
    assert visitor.left(served) == []


@pytest.mark.slow
def test_trees_differences_and_links(served, visit):
    visitor = visit()
    page = visitor.page
    page.goto(served + "#/group/one/train/2/1")
    expect(page.locator(".node")).to_have_count(7)
    page.locator("#node-1").click()
    expect(page.locator(".node-box")).to_contain_text("in 2 attempts, 4 turns")
    expect(page.locator(".node-box pre")).to_contain_text(" get amber")
    page.get_by_role("button", name="mean reward").click()
    assert "colour=reward" in page.url
    page.get_by_role("link", name="compare two attempts").click()
    expect(page.locator(".verdict")).to_have_text(
        "They part in turn 1, after 11 tokens in common: the model sampled different tokens."
    )
    expect(page.locator(".side").first.locator(".token").first).to_have_text(" answer")
    page.get_by_label("right attempt").select_option("2")
    expect(page.locator(".verdict")).to_contain_text("They part in turn 0, after 4 tokens")
    page.go_back()
    expect(page.locator(".tree-view")).to_be_visible()
    page.goto(served + "#/attempt/one/train/3/1/1?view=tokens&colour=version&turn=1&token=1")
    expect(page.locator(".card")).to_contain_text("birch")
    expect(page.locator(".token.chosen")).to_have_text(" birch")
    page.reload()
    expect(page.locator(".card")).to_contain_text("birch")
    for broken in ("#/attempt/one/train/99/0/0", "#/nothing", "#/attempts/nobody", "#/attempt/one/%E0%A4%A/1/2/3"):
        page.goto(served + broken)
        expect(page.locator("main .error, main .empty").first).to_be_visible()
    visitor.errors = [error for error in visitor.errors if "404" not in error]
    assert visitor.errors == []
    assert visitor.left(served) == []


@pytest.mark.slow
def test_all_with_the_keyboard(served, visit):
    visitor = visit()
    page = visitor.page
    press = page.keyboard.press
    page.goto(served)
    expect(page.locator("figure.chart").first).to_be_visible()
    press("?")
    expect(page.get_by_role("dialog")).to_contain_text("previous and next attempt")
    press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    press("a")
    expect(page.locator("tbody tr")).to_have_count(21)
    press("/")
    page.keyboard.type("task-2")
    expect(page.locator("tbody tr")).to_have_count(6)
    press("Escape")
    press("j")
    press("ArrowDown")
    press("k")
    press("j")
    expect(page.locator("tr.cursor")).to_have_attribute("data-key", "train/2/0/1")
    press("Enter")
    expect(page.locator("h1")).to_contain_text("step 2, group 0, attempt 1")
    expect(page.locator(".turn")).to_have_count(2)
    press("[")
    expect(page.locator("h1")).to_contain_text("attempt 0")
    expect(page.locator(".siblings a[aria-current]")).to_contain_text("0")
    press("]")
    expect(page.locator("h1")).to_contain_text("attempt 1")
    expect(page.locator(".turn")).to_have_count(2)
    press("t")
    expect(page.locator(".token").first).to_be_visible()
    press("ArrowRight")
    press("ArrowRight")
    expect(page.locator(".card")).to_contain_text("amber")
    press("v")
    expect(page.locator(".inspector button[aria-pressed=true]")).to_have_text("logprob")
    press("Escape")
    expect(page.locator(".card")).to_have_count(0)
    press("d")
    expect(page.locator(".verdict")).to_be_visible()
    press("b")
    expect(page.locator(".node").first).to_be_visible()
    press("ArrowRight")
    press("ArrowRight")
    expect(page.locator(".node-box")).to_contain_text("3 tokens, sampled")
    press("Escape")
    press("Escape")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.go_back()
    page.goto(served + "#/attempts/one?task=task-3&kind=train")
    expect(page.locator("tbody tr")).to_have_count(6)
    press("j")
    press("j")
    press("Enter")
    expect(page.locator(".turn").first).to_be_visible()
    press("Escape")
    assert "task=task-3" in page.url  # the filter is kept, and the row
    expect(page.locator("tr.cursor")).to_have_attribute("data-key", "train/3/0/1")
    press("g")
    expect(page.locator("tbody tr")).to_have_count(7)
    press("r")
    expect(page.locator("table.recipes")).to_contain_text("optimizer.rate")
    press("m")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    press("m")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    press("c")
    expect(page.locator("figure.chart canvas")).to_have_count(3)
    for _ in range(5):
        press("Tab")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    assert visitor.errors == []


@pytest.mark.slow
def test_a_live_run_beside_another(tmp_path, visit, monkeypatch):
    monkeypatch.setattr(watched_run, "SECONDS_BETWEEN", 0.1)
    make_run(tmp_path / "one", recipe={"optimizer": {"rate": 0.2}})
    live = make_run(tmp_path / "two", finished=False)
    with WatchedRuns.open([tmp_path / "one", tmp_path / "two"]) as runs, ViewServer(runs) as server:
        visitor = visit()
        page = visitor.page
        page.goto(server.url)
        second = page.locator("ul.runs li").nth(1)
        expect(second).to_contain_text("live")
        expect(second).to_contain_text("step 3 of 3")
        with live.metrics.open("a") as file:
            file.write(json.dumps({"step": 4, "success": 0.75, "seconds/step": 1}) + "\n")
        write_step(live.archive, 4, [made_group(4, 0)])
        expect(second).to_contain_text("step 4")
        expect(page.locator("figure[data-metric=success] .values")).to_contain_text("0.75")
        page.get_by_role("button", name="time").click()
        page.get_by_label("smoothing").fill("0.5")
        page.get_by_label("show one").click()
        assert "hide=one" in page.url
        page.goto(server.url + "#/attempts/two?first_step=4")
        expect(page.locator("tbody tr")).to_have_count(3)
        write_step(live.archive, 5, [made_group(5, 0)])
        expect(page.locator("tbody tr")).to_have_count(6)
        page.goto(server.url + "#/recipes")
        expect(page.locator("tbody tr")).to_have_count(1)
        expect(page.locator("tbody tr")).to_contain_text("optimizer.rate")
        live.summary.write_text('{"done": 1}')
        page.goto(server.url + "#/curves")
        expect(second).to_contain_text("finished")
        assert visitor.errors == []
        assert visitor.left(server.url) == []


VIEWS = (
    "#/curves?metrics=loss,x",
    "#/attempts/run",
    "#/groups/run",
    "#/recipes",
    "#/attempt/run/train/1/0/0",
    "#/attempt/run/train/1/0/0?view=tokens",
    "#/attempt/run/train/1/0/1",
    "#/group/run/train/1/0?node=0",
    "#/difference/run/train/1/0/0/1",
    "#/attempt/run/train/3/0/0",
)


@pytest.mark.slow
def test_no_recorded_text_is_more_than_text(tmp_path, visit):
    make_hostile_run(tmp_path / "run", observation_length=10_000_000)
    with WatchedRuns.open([tmp_path / "run"]) as runs, ViewServer(runs) as server:
        visitor = visit()
        page = visitor.page
        page.goto(server.url)
        expect(page.locator(".trouble")).to_contain_text("2 files not readable")
        for view in VIEWS:
            page.goto(server.url + view)
            page.wait_for_load_state("networkidle")
            expect(page.locator("main > *").first).to_be_visible()
            assert page.evaluate("window.ran") is None
            assert page.locator("main img, main script, main iframe").count() == 0
        page.goto(server.url + "#/attempt/run/train/1/0/0")
        first = page.locator(".turn").first
        expect(first).to_contain_text("<script>window.ran = 1</script>")
        expect(first).to_contain_text("⟨ESC⟩[31mred⟨ESC⟩[0m ⟨D800⟩ ⟨202E⟩right⟨BEL⟩ &amp; </pre>")
        expect(first).to_contain_text("⟨NUL⟩⟨NUL⟩")
        expect(first.locator(".cut")).to_contain_text(f"of {10_000_000 + len(HOSTILE):,}")
        first.locator(".cut button").click()
        expect(first.locator(".cut")).to_contain_text(f"{10_000_000 + len(HOSTILE) - 220_000:,} more")
        assert page.evaluate("window.ran") is None
        assert [error for error in visitor.errors if "404" not in error] == []
        assert visitor.left(server.url) == []


@pytest.mark.slow
def test_a_file_shows_the_same_without_a_server(tmp_path, visit):
    make_run(tmp_path / "one")
    make_hostile_run(tmp_path / "two")
    runs = WatchedRuns.open([tmp_path / "one", tmp_path / "two"])
    runs.read_all()
    files = {
        "attempt": attempt_file(runs, runs["one"], AttemptKey("train", 2, 1, 0)),
        "step": step_file(runs, runs["one"], "train", 2)[0],
        "hostile": attempt_file(runs, runs["two"], AttemptKey("train", 1, 0, 0)),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.html").write_text(text)
    visitor = visit()
    page = visitor.page
    page.goto(f"file://{tmp_path}/attempt.html")
    expect(page.locator(".turn")).to_have_count(2)
    page.keyboard.press("t")
    page.locator('[data-token="0.1"]').hover()
    expect(page.locator(".card")).to_contain_text(WORDS[7].strip())
    page.keyboard.press("b")
    expect(page.locator(".node")).to_have_count(7)
    page.goto(f"file://{tmp_path}/step.html")
    expect(page.locator("tbody tr")).to_have_count(6)
    page.locator("tbody tr").nth(1).click()
    expect(page.locator("h1")).to_contain_text("attempt 1")
    page.keyboard.press("]")
    expect(page.locator("h1")).to_contain_text("attempt 2")
    page.keyboard.press("Escape")
    expect(page.locator("tbody tr")).to_have_count(6)
    page.goto(f"file://{tmp_path}/hostile.html")
    expect(page.locator(".turn").first).to_contain_text("<script>window.ran = 1</script>")
    assert page.evaluate("window.ran") is None
    assert visitor.errors == []
    assert visitor.left("file://") == []


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone(served, visit, theme):
    visitor = visit(viewport=PHONE, color_scheme=theme)
    page = visitor.page
    views = ("#/curves", "#/attempts/one", "#/groups/one", "#/recipes", "#/attempt/one/train/2/1/0")
    for view in (
        *views,
        f"{views[-1]}?view=tokens&turn=0&token=1",
        "#/group/one/train/2/1",
        "#/difference/one/train/2/1/0/1",
    ):
        page.goto(served + view)
        page.wait_for_load_state("networkidle")
        expect(page.locator("main > *").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (theme == "dark")
    assert visitor.errors == []


@pytest.mark.slow
def test_another_machine_opens_the_address_with_the_token(tmp_path, visit):
    make_run(tmp_path / "run")
    with WatchedRuns.open([tmp_path / "run"]) as runs, ViewServer(runs, "0.0.0.0", token="s3cret") as server:
        visitor = visit()
        page = visitor.page
        base = f"http://127.0.0.1:{server.port}/"
        page.goto(base)
        expect(page.locator("body")).to_contain_text("with its token")
        page.goto(f"{base}?token=s3cret#/attempts/run")
        expect(page.locator("tbody tr")).to_have_count(21)
        assert "s3cret" not in page.url
