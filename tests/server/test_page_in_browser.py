"""The page in a real browser: Debian's chromium through Playwright. `make test-page` installs what it needs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="Playwright is not installed: make test-page")
if shutil.which("chromium") is None:
    pytest.skip("Debian's chromium is not installed", allow_module_level=True)

from playwright.sync_api import Page, expect

from rekindle.core.reply import Reuse
from rekindle.core.scope import Scope
from rekindle.server.job import Finished, Planned
from rekindle.server.serve import Server
from rekindle.settings import ServerSettings
from tests.server.conftest import Serve
from tests.server.serving import ADMIN, ALICE, Asking, Served, fake_session, serving
from tests.server.test_page import LONG, made_reply
from tools.screenshots import browser

pytestmark = pytest.mark.page
PATIENCE = 60_000  # milliseconds after which a test has failed; nothing is measured with it
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        page.set_default_timeout(PATIENCE)
        expect.set_options(timeout=PATIENCE)
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser, and nothing that went wrong in it: no error, nothing that the policy had to forbid."""
    problems: list[str] = []
    note_error, note_text = (lambda error: problems.append(str(error))), (lambda said: problems.append(said.text))
    chromium.on("pageerror", note_error)
    chromium.on("console", note_text)
    yield chromium
    chromium.remove_listener("pageerror", note_error)
    chromium.remove_listener("console", note_text)
    chromium.goto("about:blank")
    assert [text for text in problems if "Failed to load resource" not in text and "ERR_" not in text] == []


def test_a_request_is_seen_while_it_runs_and_opened(served: Served, page: Page) -> None:
    served.chat(LONG * 3)
    page.goto(served.url)
    expect(page.locator("#connection")).to_have_text("live")
    served.engine.go.clear()
    asking = Asking(lambda: served.chat(f"{LONG * 3}Why?", app_id="mail"))
    card = page.locator(".card")
    expect(card).to_contain_text("mail")
    expect(card).to_contain_text("reading the prompt")
    expect(card.get_by_role("img")).to_have_attribute("aria-label", re.compile("still in the engine.*computed"))
    served.engine.go.set()
    told = asking.result()
    row = page.locator(".requests .list-row").first
    expect(row).to_contain_text(f"of {told['usage']['prompt_tokens']}")
    expect(page.locator(".cards")).to_contain_text("Nothing runs")
    row.click()
    expect(page.get_by_role("heading", name="Request 2")).to_be_visible()
    expect(page.locator(".prompt-text .run[data-source=engine]")).to_contain_text("The keeper of the lighthouse")
    expect(page.get_by_role("heading", name="The first token that differed")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Timeline"))).to_be_visible()


def test_entries_are_pinned_removed_and_prompts_are_warmed(served: Served, page: Page) -> None:
    served.chat(LONG * 3)
    assert served.session.flush()
    page.goto(f"{served.url}/#/cache")
    page.locator(".map button.block").first.click()
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.locator(".map .pinned").first).to_be_visible()
    assert any(entry["pinned"] for entry in served.get("/v1/rekindle/entries").json()["data"])
    page.get_by_role("button", name="Unpin").click()
    expect(page.locator(".map .pinned")).to_have_count(0)
    page.get_by_role("button", name="Remove").click()
    expect(page.get_by_text("Nothing is stored yet.").first).to_be_visible()
    page.get_by_role("button", name="Warm a prompt").click()
    page.get_by_label("System message").fill(LONG)
    page.get_by_role("button", name="Warm", exact=True).click()
    expect(page.locator(".map button.block").first).to_be_visible()
    assert (
        served.chat([{"role": "system", "content": LONG}, {"role": "user", "content": "Hi"}])["rekindle"]["loaded"] > 50
    )


def test_the_chat_shows_the_reuse_of_each_turn_with_and_without_the_cache(served: Served, page: Page) -> None:
    page.goto(f"{served.url}/#/try")
    page.get_by_label("beside it, the cache off").check()
    page.get_by_label("Longest reply, in tokens").fill("4")
    for question in (LONG, "Why?"):
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
    warm, cold = (page.locator(f".chat[data-cached={cached}] .turn-foot").last for cached in ("true", "false"))
    expect(cold).to_contain_text("0 % of")
    expect(warm).to_contain_text("tokens reused")
    expect(warm).not_to_contain_text("0 % of")


def test_plots_show_the_last_hour_and_the_last_month(served: Served, page: Page) -> None:
    served.chat(LONG)
    page.goto(f"{served.url}/#/time")
    expect(page.locator(".chart rect").first).to_be_attached()
    page.get_by_role("button", name="The last month").click()
    expect(page.get_by_role("img", name=re.compile("Prompt tokens, computed and spared: computed"))).to_be_visible()


def test_nothing_of_a_prompt_becomes_html(served: Served, page: Page) -> None:
    body = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": f"{HOSTILE} {LONG}"}]
    served.chat(body, app_id=HOSTILE)
    served.chat(
        [*body, {"role": "assistant", "content": HOSTILE}, {"role": "user", "content": HOSTILE}], app_id=HOSTILE
    )
    assert served.session.flush()
    for view in ("now", "request/2", "cache", "time", "try"):
        page.goto(f"{served.url}/#/{view}")
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator("main")).not_to_contain_text("Loading")
    page.goto(f"{served.url}/#/request/2")
    expect(page.get_by_label("The prompt")).to_contain_text("<script>document.title")
    assert page.locator("main script, main img:not([alt=''])").count() == 0 and "owned" not in page.title()


def test_names_of_files_and_adapters_are_only_text(served: Served, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.server.page import views

    state = views._state
    monkeypatch.setattr(views, "_state", lambda call: state(call) | {"adapters": [{"name": HOSTILE, "loaded": True}]})
    asked = {"id": 1, "question": HOSTILE, "origin": "user", "state": "fresh", "uses": 1, "saved_seconds": 1.0}
    origin = {"url": HOSTILE, "speed": 1e6}
    about = {"answers": [asked], "origins": [origin], "idle": [], "idle_actions": [], "idle_on": True}
    monkeypatch.setattr(views, "_entries", lambda call: [])
    monkeypatch.setattr(views, "_about", lambda call: about)
    page.goto(served.url)
    expect(page.locator(".chips")).to_have_text(HOSTILE)
    page.goto(f"{served.url}/#/cache")
    expect(page.locator("main")).to_contain_text(HOSTILE)
    assert page.locator("main script, main img").count() == 0 and "owned" not in page.title()


def test_a_reload_during_a_stream_shows_it_again(served: Served, page: Page) -> None:
    page.goto(served.url)
    served.engine.go.clear()
    asking = Asking(lambda: served.chat(LONG, app_id="mail"))
    expect(page.locator(".card")).to_contain_text("mail")
    page.reload()
    expect(page.locator(".card")).to_contain_text("mail")
    served.engine.go.set()
    asking.result()
    expect(page.locator(".card")).to_have_count(0)
    expect(page.locator(".requests .list-row")).to_have_count(1)


def test_the_page_finds_a_server_that_comes_back(tmp_path: Path, page: Page) -> None:
    with serving(fake_session(tmp_path / "cache")) as served:
        page.goto(served.url)
        expect(page.locator("#connection")).to_have_text("live")
        port = int(served.url.rsplit(":", 1)[1])
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
    again = Server(fake_session(tmp_path / "cache"), ServerSettings(port=port))
    with again.running() as url:
        Served(url, again, again.host.services()[0].session).chat("Hi", app_id="mail")
        expect(page.locator("#connection")).to_have_text("live")
        expect(page.locator(".requests .list-row")).to_contain_text("mail")


def test_the_theme_is_switched_and_stays(served: Served, page: Page) -> None:
    page.goto(served.url)
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_role("button", name="Switch between light and dark").click()
    after = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert after != before
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == after
    page.evaluate("localStorage.clear()")


def test_the_page_asks_for_the_operators_key(keyed: Served, page: Page) -> None:
    page.goto(keyed.url)
    for key in (ALICE, ADMIN):
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_role("textbox", name="Key").fill(key)
        page.get_by_role("button", name="Open").click()
    expect(page.locator("#connection")).to_have_text("live")


def test_ten_thousand_rows_are_few_elements_and_the_keyboard_reaches_all(served: Served, page: Page) -> None:
    recent = served.service.recent
    for number in range(10_000):
        record = recent.begin(Scope("local"), f"app {number}", served.service.model, None, keeps_text=False)
        recent.take(record, Planned(Reuse("exact", 10)))
        record.spans = [(0, 6, "disk"), (6, 10, "computed")]
        recent.take(record, Finished(made_reply(Reuse("exact", 4, disk=6))))
    page.goto(served.url)
    rows = page.locator(".requests .list-row")
    expect(rows.first).to_contain_text("app")
    page.locator(".list-scroll").focus()
    page.keyboard.press("End")
    expect(page.locator(".list-row.active")).to_contain_text("app 0")
    assert rows.count() < 60
    page.keyboard.press("ArrowUp")
    expect(page.locator(".list-row.active")).to_contain_text("app 1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Request 2")).to_be_visible()
    page.keyboard.press("3")
    expect(page.get_by_role("link", name="The cache")).to_have_attribute("aria-current", "page")


CONTRAST = """button => {
    const parts = colour => (colour.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
    const linear = share => share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    const light = colour => parts(colour).slice(0, 3).map(c => linear(c / (colour.startsWith("color(") ? 1 : 255)))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = element => getComputedStyle(element).backgroundColor;
    let behind = button;
    while (behind !== document.body && (parts(ground(behind))[3] ?? 1) === 0) behind = behind.parentElement;
    const [one, other] = [light(getComputedStyle(button).color), light(ground(behind))].sort((a, b) => b - a);
    return (one + 0.05) / (other + 0.05);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_button_can_be_read_under_the_mouse(served: Served, page: Page, theme: str) -> None:
    served.chat(LONG * 3, app_id="mail")
    assert served.session.flush()
    page.goto(served.url)
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    for view in ("cache", "time", "try"):
        page.evaluate("view => { location.hash = `#/${view}` }", view)
        expect(page.locator("main .panel").first).to_be_visible()
        buttons = page.locator("main button:not(:disabled):not(.block)")
        expect(buttons.first).to_be_visible()
        for button in buttons.all():
            button.hover()
            assert button.evaluate(CONTRAST) >= 4.5, button.text_content()


def test_a_long_example_can_be_sent_as_it_is(served: Served, page: Page) -> None:
    page.goto(f"{served.url}/#/try")
    page.get_by_label("Longest reply, in tokens").fill("4")
    page.get_by_role("button", name="A long example").click()
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".chat[data-cached=true] .turn-foot")).to_contain_text("tokens reused")
    page.get_by_label("Message", exact=True).fill("Mine?")
    page.get_by_role("button", name="A long example").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Mine?")


def test_the_chat_tells_how_far_its_prompt_is_read(served: Served, page: Page) -> None:
    page.goto(f"{served.url}/#/try")
    page.get_by_label("Longest reply, in tokens").fill("4")
    page.get_by_label("Message", exact=True).fill(LONG * 3)
    served.engine.go.clear()
    page.get_by_role("button", name="Send").click()
    foot = page.locator(".chat[data-cached=true] .turn-foot")
    expect(foot).to_contain_text(re.compile(r"reading the prompt: 0 of [\d,]+ tokens.*the next time at once"))
    served.engine.permits.release()
    expect(foot).to_contain_text(re.compile(r"reading the prompt: [1-9][\d,]* of [\d,]+ tokens"))
    served.engine.go.set()
    expect(foot).to_contain_text("tokens reused")


def test_a_card_stays_within_its_frame_on_a_phone(served: Served, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    from rekindle.server.page import views

    full = {"bytes": 888_800_000_000, "limit_bytes": 999_900_000_000}
    tiers = {"process_bytes": 888_800_000_000, "memory_limit_bytes": 999_900_000_000, "memory": full, "disk": full}
    monkeypatch.setattr(views, "_tiers", lambda call: tiers)
    served.chat(LONG * 3, app_id="mail")
    try:
        for width in (320, 375, 430):
            page.set_viewport_size({"width": width, "height": 700})
            page.goto(served.url)
            expect(page.locator(".tile .meter").first).to_contain_text("GB")
            wide = "tiles => tiles.filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
            assert page.locator(".tile, .tile *").evaluate_all(wide) == [], width
            assert page.evaluate("document.documentElement.scrollWidth") <= width
    finally:
        page.set_viewport_size({"width": 1360, "height": 900})


def test_a_phone_needs_no_sideways_scrolling(served: Served, page: Page) -> None:
    served.chat(LONG * 3, app_id="mail")
    assert served.session.flush()
    try:
        for width, view in product((320, 375), ("now", "request", "cache", "time", "try")):
            page.set_viewport_size({"width": width, "height": 700})
            page.goto(f"{served.url}/#/{view}")
            expect(page.locator("#connection")).to_have_text("live")
            expect(page.locator("main .panel").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
    finally:
        page.set_viewport_size({"width": 1360, "height": 900})


def test_everything_that_can_be_pressed_has_a_name(served: Served, page: Page) -> None:
    served.chat(LONG * 3, app_id="mail")
    assert served.session.flush()
    for view in ("now", "request", "cache", "time", "try"):
        page.goto(f"{served.url}/#/{view}")
        expect(page.locator("main .panel").first).to_be_visible()
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, a, input, select, textarea")]
                .filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.outerHTML)"""
        )
        assert nameless == [], view


def test_without_keys_and_without_a_page_the_browser_gets_the_greeting(serve: Serve, page: Page) -> None:
    page.goto(serve(page=False).url)
    assert "Rekindle" in page.content() and page.locator("#tabs").count() == 0
