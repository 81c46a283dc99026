"""The dashboard as people meet it: in a browser, over processes, with keys and without a mouse."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dashboard.browser import ENGINES, Fleet, Look, launched, playwright
from helpers import free_port

pytestmark = pytest.mark.slow
expect = playwright.expect

TOKEN = "correct-horse-battery"
#: Elements wider than their box, apart from scrolling ones and ones for screen readers.
CUT = """() => [document.documentElement,
    ...document.querySelectorAll('section, figure, .tiles > div, .bar, form')]
  .filter(each => each.scrollWidth > each.clientWidth + 1)
  .map(each => `${each.tagName} ${each.id} ${each.scrollWidth} > ${each.clientWidth}`)"""

#: Cells of the fleet that reach beyond the page or under another one.
COVERED = """() => Array.from(document.querySelectorAll('#models tbody tr')).flatMap(row => {
  const boxes = Array.from(row.children).map(each => each.getBoundingClientRect()).filter(box => box.width);
  const out = boxes.filter(box => box.left < -1 || box.right > innerWidth + 1);
  const over = boxes.filter((a, i) => boxes.some((b, j) => j > i
    && a.left + 1 < b.right && b.left + 1 < a.right && a.top + 1 < b.bottom && b.top + 1 < a.bottom));
  return [...out, ...over].map(box => `${row.innerText} ${box.left} ${box.right}`);
})"""
#: Tiles with a line of their own.
ALONE = """() => {
  const tiles = document.querySelector('#tiles').children;
  const tops = Array.from(tiles, each => each.getBoundingClientRect().top);
  return tops.filter(top => tops.filter(other => other === top).length < 2);
}"""

#: Labels of a chart that lie on one another.
OVERLAID = """() => Array.from(document.querySelectorAll('figure svg')).flatMap(chart => {
  const found = Array.from(chart.querySelectorAll('text:not(.peak)'))
    .filter(each => each.textContent && each.getAttribute('visibility') !== 'hidden')
    .map(each => [each.textContent, each.getBoundingClientRect()]);
  return found.flatMap(([text, a], i) => found.slice(i + 1)
    .filter(([, b]) => a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
    .map(([other]) => `${text} | ${other}`));
})"""
#: Text of charts that is not drawn at the size of the style sheet: the chart is of another width.
SCALED = """() => Array.from(document.querySelectorAll('figure svg[role=img]'))
  .filter(each => each.clientWidth && Math.abs(each.viewBox.baseVal.width - each.clientWidth) > 1)
  .map(each => `${each.getAttribute('aria-label')} ${each.viewBox.baseVal.width} in ${each.clientWidth}`)"""
#: Servers whose switch is not beside their name, or with a figure in two lines, where one has room for all.
WRAPPED = """() => Array.from(document.querySelectorAll('#models tbody tr:not([hidden])'))
  .filter(row => innerWidth > 1000 && row.querySelector('th')).filter(row => {
    const [name, buttons] = ['th', '.states'].map(each => row.querySelector(each).getBoundingClientRect());
    const folded = Array.from(row.querySelectorAll('th, td[data-title]')).some((each) => {
      const { display, lineHeight } = getComputedStyle(each);
      return display !== 'table-cell' && each.clientHeight > 1.9 * parseFloat(lineHeight);
    });
    return buttons.top >= name.bottom || buttons.height > 40 || folded;
  }).map(row => row.innerText)"""
#: Lists that must be empty on a screen of any width: their names, and the scripts that make them.
FLAWS = {
    "cut": CUT, "covered": COVERED, "alone": ALONE, "overlaid": OVERLAID, "scaled": SCALED, "wrapped": WRAPPED
}  # fmt: skip
#: Ends when what follows a change of the width has been drawn.
DRAWN = """async () => {
  for (let frame = 0; frame < 3; frame += 1) await new Promise(requestAnimationFrame);
}"""


def flaws(look: Look) -> dict[str, list[str]]:
    """Return what is cut, covered, alone, overlaid, scaled or wrapped on a page as it is."""
    look.page.evaluate(DRAWN)
    found = {name: look.page.evaluate(script) for name, script in FLAWS.items()}
    return {name: each for name, each in found.items() if each}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as browser:
        yield browser


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Three engines of unequal speed behind a proxy; every test leaves them ready."""
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.serve({name: fleet.start_engine(name, profile) for name, profile in ENGINES.items()})
        yield fleet
    finally:
        fleet.close()


@pytest.fixture
def look(browser: Any, running: Fleet) -> Iterator[Look]:
    """The page, live; in the end nothing may have gone wrong on it, and nothing came from elsewhere."""
    look = Look(browser, f"{running.admin}/").live()
    yield look
    look.close()
    assert look.errors == []
    assert all(url.startswith((running.admin, "data:")) for url in look.requests)


def test_the_fleet_is_shown(look: Look) -> None:
    expect(look.page).to_have_title("hetlb")
    expect(look.page.locator("#models tbody tr")).to_have_count(len(ENGINES))
    for name in ENGINES:
        expect(look.row(name).locator(".pill")).to_have_text("up")
        expect(look.row(name).get_by_role("button", name="ready")).to_have_attribute("aria-pressed", "true")
    expect(look.page.locator("#tiles")).to_contain_text(f"{len(ENGINES)} of {len(ENGINES)}")


def test_there_is_one_stream_and_nothing_is_polled(look: Look, running: Fleet) -> None:
    before = look.page.locator("#tiles").inner_text()
    running.ask(3)
    expect(look.page.locator("#decision-rows tr.decision").first).to_be_visible()
    expect(look.page.locator("#tiles")).not_to_have_text(before)
    paths = [url.removeprefix(running.admin) for url in look.requests if not url.startswith("data:")]
    files = ["/", "/dashboard.css", "/dashboard.js", "/theme.css", "/charts.js", "/dom.js"]
    assert sorted(paths) == sorted([*files, "/v1/events"])


def test_a_drain_is_clicked_and_takes_effect(look: Look, running: Fleet) -> None:
    chosen = running.ask()[0]  # on a busy machine not always the fastest
    row = look.row(chosen)
    row.get_by_role("button", name="drain").click()
    expect(row.get_by_role("button", name="drain")).to_have_attribute("aria-pressed", "true")
    expect(look.page.locator("#news")).to_have_text(f"{chosen} is draining.")
    assert running.state(chosen) == "drain"
    assert chosen not in running.ask(3)
    row.get_by_role("button", name="ready").click()
    expect(row).to_have_attribute("data-state", "ready")
    assert running.state(chosen) == "ready"


def test_draining_the_last_instance_asks_first(look: Look, running: Fleet) -> None:
    asked: list[str] = []

    def answer(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.dismiss()

    look.page.on("dialog", answer)
    for name in ("v100-0", "v100-1"):
        look.row(name).get_by_role("button", name="maint").click()
        expect(look.row(name)).to_have_attribute("data-state", "maint")
    look.row("a800-0").get_by_role("button", name="drain").click()
    assert ["a800-0 is the last instance" in text for text in asked] == [True]
    assert running.state("a800-0") == "ready"
    for name in ("v100-0", "v100-1"):
        look.row(name).get_by_role("button", name="ready").click()
        expect(look.row(name)).to_have_attribute("data-state", "ready")


def test_a_decision_is_opened(look: Look, running: Fleet) -> None:
    [chosen] = running.ask()
    decision = running.decision()
    # The newest row once this request is there: from then on all is counted from it.
    row = look.page.locator("#decision-rows tr.decision").first
    button = row.get_by_role("button", name=f"Why request {decision['request_id']} went to {chosen}")
    button.click()
    expect(button).to_have_attribute("aria-expanded", "true")
    table = look.page.locator("tr.detail table")
    expect(table.locator("tbody tr")).to_have_count(len(ENGINES))
    expect(table.locator("tbody tr").first).to_contain_text("chosen: ")
    for term in decision["candidates"][0]["terms"]:
        header = term.removesuffix("_s").replace("_", " ")
        counts = any(each["terms"] and each["terms"][term] for each in decision["candidates"])
        expect(table.get_by_role("columnheader", name=header)).to_have_count(int(counts))
    expect(table.get_by_role("columnheader", name="Batch")).to_have_count(0)
    for each in decision["candidates"]:
        why = each["reason"] or ("chosen" if each["instance"] == chosen else "score higher by")
        expect(table.get_by_role("row", name=each["instance"])).to_contain_text(why)
    # While it is read the list stays; then it goes on.
    running.ask(2)
    expect(look.page.locator("#held")).to_have_text("2 newer decisions not shown")
    look.page.get_by_label("Hold the list").uncheck()
    expect(look.page.locator("tr.detail table")).to_have_count(0)
    expect(look.page.locator("#held")).to_have_text("")


def test_the_policy_is_switched(look: Look, running: Fleet) -> None:
    for name in ("paper", "hetlb"):
        look.page.get_by_label("Policy").first.select_option(name)
        look.page.get_by_role("button", name="Switch").click()
        expect(look.page.locator("#policy")).to_have_attribute("data-in-force", name)
        expect(look.page.get_by_role("button", name="Switch")).to_be_disabled()
        [chosen] = running.ask()
        newest = look.page.locator("#decision-rows tr.decision").first
        expect(newest.locator("td").last).to_have_text(name)
        if name == "paper":
            newest.get_by_role("button").click()
            table = look.page.locator("tr.detail table")
            expect(table.get_by_role("row", name=chosen)).to_contain_text("chosen: the lowest score of 3")
            expect(table.locator("tbody tr").last).to_contain_text("score higher by")
            look.page.get_by_label("Hold the list").uncheck()


def test_predictions_and_series_are_drawn(look: Look, running: Fleet) -> None:
    running.ask(3, tokens=20)
    expect(look.page.locator("#scatters")).to_contain_text(re.compile(r"\d+ % of \d+ answers"))
    assert look.page.locator("#scatters path.dots").count() >= 2
    expect(look.page.locator("#outcomes")).to_contain_text(" ok")
    expect(look.page.locator("#charts figure")).to_have_count(5)


def test_it_is_used_with_keys_alone(look: Look, running: Fleet) -> None:
    page = look.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the fleet")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#fleet")).to_be_focused()
    drain = look.row("v100-1").get_by_role("button", name="drain")
    for _ in range(40):
        page.keyboard.press("Tab")
        if drain.evaluate("element => element === document.activeElement"):
            break
    expect(drain).to_be_focused()
    assert drain.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"
    page.keyboard.press("Space")
    expect(look.row("v100-1")).to_have_attribute("data-state", "drain")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(look.row("v100-1")).to_have_attribute("data-state", "ready")
    running.ask()
    chart = page.get_by_role("img", name="Requests per second")
    expect(chart).to_have_attribute("aria-label", re.compile("latest"))
    chart.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart).to_have_attribute("aria-label", re.compile(r"ok: [\d.]+ \d+ s ago"))


def test_colours_follow_the_system_and_the_switch(look: Look) -> None:
    def ground() -> tuple[int, ...]:
        colour = look.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return tuple(map(int, re.findall(r"\d+", colour)))

    assert min(ground()) > 200
    look.page.emulate_media(color_scheme="dark")
    assert max(ground()) < 60
    look.page.get_by_label("Colours").select_option("light")
    assert min(ground()) > 200
    look.page.reload()
    look.live()
    assert min(ground()) > 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_screen_readers_out(look: Look, running: Fleet, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python")
    look.page.emulate_media(color_scheme=scheme)
    running.ask(2, tokens=10)
    look.page.locator("button.open").first.click()
    expect(look.page.locator("tr.detail table")).to_be_visible()
    found = axe.Axe().run(look.page).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []


def test_an_engine_that_dies_is_shown(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        ports = {name: free_port() for name in ("a800-0", "v100-0")}
        fleet.serve({name: fleet.start_engine(name, ENGINES[name], ports[name]) for name in ports})
        look = Look(browser, f"{fleet.admin}/").live()
        expect(look.row("a800-0").locator(".pill")).to_have_text("up")
        fleet.kill("a800-0")
        expect(look.row("a800-0").locator(".pill")).to_have_text("ejected")
        expect(look.row("a800-0").locator(".why")).to_have_text("connection refused")
        expect(look.page.locator("#news")).to_have_text("a800-0 is ejected: connection refused.")
        expect(look.page.locator("#tiles")).to_contain_text("1 of 2")
        fleet.start_engine("a800-0", ENGINES["a800-0"], ports["a800-0"])
        expect(look.row("a800-0").locator(".pill")).to_have_text("up")
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


def test_a_proxy_that_goes_and_returns(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        urls = {"a800-0": fleet.start_engine("a800-0", ENGINES["a800-0"])}
        port = free_port()
        fleet.serve(urls, admin={"port": port})
        look = Look(browser, f"{fleet.admin}/").live()
        fleet.kill("serve")
        expect(look.page.locator("#link")).to_have_text("no connection")
        expect(look.page.locator("#news")).to_have_text("The connection to the proxy is lost.")
        fleet.serve(urls, admin={"port": port})
        look.live()
        expect(look.page.locator("#news")).to_have_text("The connection to the proxy is back.")
        look.close()
    finally:
        fleet.close()


def test_the_token_is_asked_for_kept_in_the_tab_and_sent(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        fleet.serve({"a800-0": fleet.start_engine("a800-0", ENGINES["a800-0"])}, token=TOKEN)
        look = Look(browser, f"{fleet.admin}/")
        page = look.page
        dialog = page.get_by_role("dialog", name="Admin token")
        for token, wrong in (("not-the-token", ""), (TOKEN, "That was not the token.")):
            expect(dialog).to_be_visible()
            expect(page.locator("#ask-why")).to_have_text(wrong)
            page.get_by_label("Token", exact=True).fill(token)
            page.keyboard.press("Enter")
        look.live()
        expect(dialog).to_be_hidden()
        expect(page.locator("#links")).to_be_hidden()
        look.row("a800-0").get_by_role("button", name="maint").click()
        page.on("dialog", lambda each: each.accept())
        look.row("a800-0").get_by_role("button", name="maint").click()
        expect(look.row("a800-0")).to_have_attribute("data-state", "maint")
        assert fleet.state("a800-0") == "maint"
        # It is in no address and outlasts a reload of this tab, not the tab.
        assert not any(TOKEN in url for url in look.requests)
        assert page.evaluate("Object.values(localStorage).join()").find(TOKEN) < 0
        page.reload()
        look.live()
        look.close()
        refused = [error for error in look.errors if "401" not in error]
        assert refused == []
    finally:
        fleet.close()


def test_it_stays_usable_with_200_instances(browser: Any, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    try:
        port = fleet.start_engine("one", "fast.yaml", 0, "--host", "0.0.0.0").rpartition(":")[2]
        # One engine at 200 addresses of this machine: every instance has one of its own.
        urls = {f"node-{number:03}": f"http://127.0.1.{number + 1}:{port}" for number in range(200)}
        fleet.serve(urls, scrape={"interval_s": 60, "timeout_s": 30})
        look = Look(browser, f"{fleet.admin}/").live()
        rows = look.page.locator("#models tbody tr")
        expect(rows).to_have_count(100)
        expect(look.page.locator("#shown")).to_contain_text("100 of 200 instances shown: the ones in trouble")
        fleet.ask()
        look.page.get_by_label("Filter").fill("node-17")
        expect(look.page.locator("#models tbody tr:visible")).to_have_count(10)
        expect(look.page.locator("#shown")).to_have_text("10 of 200 instances shown")
        look.row("node-171").get_by_role("button", name="drain").click()
        expect(look.row("node-171")).to_have_attribute("data-state", "drain")
        look.page.get_by_label("Filter").fill("")
        look.page.get_by_label("Order").select_option("health")
        expect(rows.first).to_contain_text("node-171")
        look.page.locator("button.open").first.click()
        candidates = look.page.locator("tr.detail tbody tr")
        expect(candidates).to_have_count(12)
        look.page.get_by_role("button", name="Show all 200").click()
        expect(candidates).to_have_count(200)
        look.close()
        assert look.errors == []
    finally:
        fleet.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_at_any_width(browser: Any, running: Fleet, scheme: str) -> None:
    running.ask(3)
    look = Look(browser, f"{running.admin}/", color_scheme=scheme).live()
    try:
        look.page.locator("button.open").first.click()
        for width in (360, 390, 768, 1024, 1400, 1440, 1920):
            look.page.set_viewport_size({"width": width, "height": 900})
            assert flaws(look) == {}, width
        assert look.errors == []
    finally:
        look.close()


def test_the_state_comes_before_the_controls_on_a_phone(look: Look) -> None:
    top = "Math.round(document.querySelector('{}').getBoundingClientRect().top)".format
    state, controls = top("#status"), f"Math.min({top('#policy')}, {top('#theme')})"
    # The page's policy forbids to compile text, as `wait_for_function` does at its second look.
    frames = "async () => {{ while (!({} < {})) await new Promise(requestAnimationFrame) }}".format
    look.page.set_viewport_size({"width": 390, "height": 844})
    look.page.evaluate(frames(state, controls))
    look.page.set_viewport_size({"width": 1024, "height": 768})
    look.page.evaluate(frames(controls, state))


#: Chart of values near 1 and others: height of its median above its least in pixels, word of its peak.
CHART = """async (others) => {
  const { LineChart } = await import('./charts.js');
  const chart = new LineChart('t', [['a', 'k0']], {}, { least: 0 }, { robust: true });
  document.body.append(chart.element);
  const values = Array.from({ length: 100 }, (_, n) => 1 + (n % 7) / 10);
  others.forEach((value, n) => { values[10 * n + 3] = value; });
  chart.update([values.map((value, n) => [n, value])]);
  const path = chart.element.querySelector('[role=img] path.line').getAttribute('d');
  const ys = path.match(/ [\\d.]+/g).map(Number);
  const peak = chart.element.querySelector('.peak');
  const shown = peak.getAttribute('visibility') === 'visible' ? peak.textContent : '';
  chart.element.remove();
  return [Math.max(...ys) - ys.sort((a, b) => a - b)[Math.floor(ys.length / 2)], shown];
}"""


#: Labels of both axes of a chart of five minutes whose values rise to `most` seconds.
LABELS = """async (most) => {
  const { TimeChart } = await import('./charts.js');
  const chart = new TimeChart('t', [['a', 'a', 'k0']], (value) => `${value} s`);
  document.body.append(chart.element);
  chart.update({ bin_s: 3, a: Array.from({ length: 100 }, (_, n) => most * n / 99) });
  const found = Array.from(chart.element.querySelectorAll('[role=img] text'), each => each.textContent);
  chart.element.remove();
  return found.filter(each => each);
}"""


@pytest.mark.parametrize(("most", "top"), [(42.4, ["0 s", "50 s"]), (0.8, ["0 s", "0.5 s", "1 s"])])
def test_axes_end_at_round_figures(look: Look, most: float, top: list[str]) -> None:
    assert look.page.evaluate(LABELS, most) == [*top, "−4 min", "−2 min", "now"]


#: Width of what a chart of time shows of one value between gaps, in pixels.
SINGLE = """async () => {
  const { TimeChart } = await import('./charts.js');
  const chart = new TimeChart('t', [['a', 'a', 'k0']], (value) => `${value} s`);
  document.body.append(chart.element);
  chart.update({ bin_s: 3, a: Array.from({ length: 100 }, (_, n) => n === 90 ? 1 : null) });
  const { width } = chart.element.querySelector('[role=img] path.line').getBBox();
  chart.element.remove();
  return width;
}"""


def test_one_value_between_gaps_is_seen(look: Look) -> None:
    assert look.page.evaluate(SINGLE) >= 3


def test_an_outlier_does_not_flatten_a_chart_and_is_written(look: Look) -> None:
    usual, no_peak = look.page.evaluate(CHART, [])
    assert no_peak == ""
    flat, peak = look.page.evaluate(CHART, [500])
    assert peak == "▲ 500"
    assert flat > usual / 2
    # Many high values are no outliers.
    _, peak = look.page.evaluate(CHART, [500] * 9)
    assert peak == ""
