"""Screenshots of the page for the guide: a server on the embedded model, a few clients, five views. `make screenshots`.

    python -m tools.screenshots [--to docs/guide/page] [--theme dark]

Needs Debian's chromium and Playwright. The plots over time repeat the replies of this run at other hours of the month:
a month of use is not to be had in a minute.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from rekindle import Session
from rekindle.server.serve import Server
from rekindle.server.service import Service
from rekindle.server.usage_log import UsageLog
from rekindle.settings import ServerSettings
from rekindle.store import report

_RULES = (
    "answer in one or two plain sentences, and never guess a name, a date or a number.",
    "the lighthouse log is the only source for what the keepers saw; quote it word by word.",
    "weather is given as in the log: wind first, then sea, then visibility.",
    "if two entries of the log contradict each other, say so and give both.",
    "times are those of the lamp: a day begins when it is lit and ends when it is put out.",
    "distances are in nautical miles, depths in fathoms, and the tide as rising, slack or falling.",
    "visitors may ask about the keepers, but not about their letters.",
)
RULES = " ".join(f"Rule {number}: {text}" for number, text in enumerate(_RULES * 3, start=1))
QUESTIONS = (
    "When was the lamp lit?",
    "Which ships passed at night?",
    "How was the sea on Sunday?",
    "Who kept the log?",
)
LAMP = "The lamp of the lighthouse is lit at dusk by the keeper, who carries the oil up two hundred steps. "
SUNDAY = "Sunday: wind from the north-west, sea rough, visibility eight miles. The Mary of Hull passed at noon. "
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking")


@contextmanager
def browser(width: int = 1360, height: int = 900, **options: Any) -> Iterator[Page]:
    """A page in Debian's chromium, with a profile of its own."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=shutil.which("chromium"),
            args=FLAGS,
            viewport={"width": width, "height": height},
            **options,
        )
        try:
            yield context.pages[0]
        finally:
            context.close()


def ask(url: str, system: str, question: str, app: str, max_tokens: int = 24) -> None:
    """One turn of a client."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    sent = {"messages": messages, "app_id": app, "max_tokens": max_tokens, "temperature": 0}
    httpx.post(f"{url}/v1/chat/completions", json=sent, timeout=300.0).raise_for_status()


def use(url: str, session: Session) -> None:
    """Agents that share a prompt, one that spoils it with the time, and a question about documents."""
    for app in ("mail", "editor"):
        for question in QUESTIONS:
            ask(url, f"You are the assistant of {app}. {RULES}", question, app)
    for minute in range(3):
        ask(url, f"It is 9:{10 + minute} in the morning. {RULES}", QUESTIONS[0], "agent")
    documents = [{"text": LAMP * 4, "source": "lamp.md"}, {"text": SUNDAY * 4, "source": "log-may.md"}]
    httpx.post(f"{url}/v1/rekindle/documents", json={"documents": documents}, timeout=300.0).raise_for_status()
    for _ in range(2):
        question = {"question": "Who lights the lamp?", "max_tokens": 24, "temperature": 0}
        httpx.post(f"{url}/v1/rekindle/ask", json=question, timeout=300.0).raise_for_status()
    session.flush()


def repeat(service: Service, path: Path) -> None:
    """Count the replies of this run again, at hours of the last month and minutes of the last hour."""
    store, draw, now = service.session.cache.store, random.Random(32), time.time()
    assert store is not None
    levels = {"bytes.disk": report.used_bytes(store.disk), "bytes.memory": store.memory.size_bytes}
    clock = [0.0]
    service.usage = UsageLog(path, lambda: levels, lambda: clock[0])
    records = [service.recent.get(row["id"]) for row in service.recent.rows()]
    replies = [record.reply for record in records if record is not None and record.reply is not None]
    hours = [now - 3600 * hour for hour in range(1, 740) if 7 < (now / 3600 - hour) % 24 < 22]
    minutes = [now - 60 * minute for minute in range(1, 59)]
    for at in sorted([*draw.choices(hours, k=900), *draw.choices(minutes, k=10)]):
        clock[0] = at
        if service.usage.count(draw.choice(replies)):
            service.usage.flush()
    clock[0] = now


def take(page: Page, url: str, folder: Path) -> None:
    """The five views, each once it shows what it has."""
    page.goto(f"{url}/")
    page.wait_for_selector(".requests .list-row")
    clients = (("mail", "Who may ask for letters?"), ("notes", QUESTIONS[0]))
    running = [
        threading.Thread(target=ask, args=(url, f"You are the assistant of {app}. {RULES}", question, app, 120))
        for app, question in clients
    ]
    for thread in running:
        thread.start()
    page.wait_for_selector(".card .filling")
    page.screenshot(path=folder / "now.png")
    for thread in running:
        thread.join()
    page.goto(f"{url}/#/request/3")  # of the mail app: it shares its beginning with the one before
    page.wait_for_selector(".prompt-text .run")
    page.screenshot(path=folder / "request.png", full_page=True)
    page.goto(f"{url}/#/cache")
    page.locator(".map button.block").first.click()
    page.screenshot(path=folder / "cache.png", full_page=True)
    page.goto(f"{url}/#/time")
    page.get_by_role("button", name="The last month").click()
    page.wait_for_selector(".chart rect")
    page.screenshot(path=folder / "time.png", full_page=True)
    page.goto(f"{url}/#/try")
    page.get_by_label("beside it, the cache off").check()
    page.get_by_label("System message").fill(f"You are the assistant of mail. {RULES}")
    page.get_by_label("Longest reply, in tokens").fill("24")
    for question in QUESTIONS[:2]:
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        page.wait_for_function("() => !document.querySelector('form .main').disabled", timeout=300_000)
    page.screenshot(path=folder / "try.png", full_page=True)
    for name in ("now", "request", "cache", "time", "try"):  # few colours: a third of the size
        with Image.open(folder / f"{name}.png") as picture:
            few = picture.convert("RGB").quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
            few.save(folder / f"{name}.png", optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("docs/guide/page"))
    parser.add_argument("--theme", choices=["light", "dark"], default="light")
    parser.add_argument("--width", type=int, default=1240)
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        places = {"cache": f"{folder}/cache", "library": f"{folder}/library"}
        session = Session("smollm2", parallel=4, **places)
        server = Server(session, ServerSettings(port=0))
        with server.running() as url:
            use(url, session)
            repeat(server.host.services()[0], Path(folder) / "usage.db")
            with browser(given.width, color_scheme=given.theme) as page:
                take(page, url, given.to)


if __name__ == "__main__":
    main()
