"""The page in a real browser: Chromium, headless, driven by Selenium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from report.maps import frames_of, holders_at, instants

from kvsim.memory.journal import read_csv
from kvsim.result import CompareResult, RunResult
from kvsim.runs import Options, compare, run

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e .[dev]")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no browser: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1000,900",
)  # fmt: skip

BASE: dict[str, Any] = {
    "name": "page",
    "seed": 3,
    "memory": {"num_gpu_blocks_override": 60},
    "allocator": {"block_size": 4},
    "scheduler": {"max_model_len": 64},
    "workload": {
        "num_requests": 25,
        "arrivals": {"type": "poisson", "request_rate": 300},
        "lengths": {"type": "uniform", "prompt": [3, 30], "output": [2, 20]},
        "sampling": {"n": 3},
    },
}
ENGINES = ("paged", "orca-pow2")


class Page(NamedTuple):
    """An open page and the run behind it."""

    browser: Any
    result: RunResult

    def run(self, script: str, *values: Any) -> Any:
        return self.browser.execute_script(script, *values)

    def find(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def seek(self, frame: int) -> None:
        """Move the slider as a hand does: set it, and let the page hear of it."""
        self.run("const s = document.querySelector('#clock'); s.value = arguments[0];"
                 "s.dispatchEvent(new Event('input'));", frame)  # fmt: skip

    def press(self, *keys: str) -> None:
        self.browser.switch_to.active_element.send_keys(*keys)

    def wait_for(self, script: str, *values: Any) -> None:
        until = time.monotonic() + 20
        while not self.run(script, *values):
            assert time.monotonic() < until, f"does not come true: {script}"
            time.sleep(0.05)

    def focused(self) -> str:
        """Id of the element with the focus, or its tag."""
        return str(self.run("const e = document.activeElement; return e.id || e.tagName.toLowerCase();"))

    def tab_to(self, name: str, most: int = 15) -> None:
        for _ in range(most):
            if self.focused() == name:
                return
            self.press(Keys.TAB)
        raise AssertionError(f"{name} is not reached by the tab key; the focus is on {self.focused()}")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def result_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RunResult]:
    @cache
    def once(engine: str) -> RunResult:
        out = tmp_path_factory.mktemp("run") / "out"
        return run({**BASE, "engine": engine}, out=out, options=Options(plots=False, report=True))

    return once


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> CompareResult:
    out = tmp_path_factory.mktemp("compare") / "out"
    return compare(BASE, ENGINES, out=out, options=Options(plots=False, report=True))


@pytest.fixture
def open_page(browser: Any, result_of: Callable[[str], RunResult]) -> Iterator[Callable[[str], Page]]:
    """Opens an engine's page; afterwards nothing may stand in the browser's console."""

    def opened(engine: str) -> Page:
        result = result_of(engine)
        browser.get(f"file://{result.out}/report.html")
        return Page(browser, result)

    browser.get_log("browser")
    yield opened
    assert browser.get_log("browser") == []


def recording_of(page: Page) -> dict[str, Any]:
    assert page.result.block_map is not None
    return page.result.block_map


@pytest.mark.parametrize("engine", ENGINES)
def test_map_shows_the_blocks_of_the_journal(engine: str, open_page: Callable[[str], Page]) -> None:
    page = open_page(engine)
    assert page.result.out is not None
    events = read_csv(page.result.out / "events.csv")
    num_frames = page.run("return kvsim.numFrames()")
    assert num_frames == len(recording_of(page)["frames"])
    for frame in instants(num_frames):
        page.seek(frame)
        state = page.run("return kvsim.stateAt(kvsim.player.panes[0].frame)")
        holders = {int(block_id): block["owners"] for block_id, block in state["blocks"].items()}
        assert holders == holders_at(events, state["t_ns"]), frame
        assert page.find("#time").text.endswith(f"step {state['step']}")


READ = """
const pane = kvsim.player.panes[0], {width, height} = pane.canvas, size = pane.layout.size * devicePixelRatio;
const copy = new OffscreenCanvas(width, height).getContext("2d");
copy.drawImage(pane.canvas, 0, 0);
const data = copy.getImageData(0, 0, width, height).data;
const pixel = (cell, x, y) => {
  const [left, top] = pane.corner(cell);
  const [column, row] = [left * devicePixelRatio + x * size, top * devicePixelRatio + y * size];
  const at = 4 * (Math.round(row) * width + Math.round(column));
  return [...data.slice(at, at + 3)];
};
"""
"""`pixel(cell, x, y)`: the colour at a place of a cell, in shares of its size."""

PAINTED = (
    READ
    + """
const color = kvsim.player.colors.free;
const free = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)).join();
const isUsed = (cell) => pixel(cell, 0.2, 0.7).join() !== free;
return [...Array(pane.numCells).keys()].filter(isUsed).map((cell) => pane.idOf(cell));
"""
)


def test_painted_cells_are_the_used_blocks(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    frames = list(frames_of(recording_of(page)))
    for index in (len(frames) // 4, len(frames) // 2, len(frames) - 1):
        page.seek(index)
        page.run("kvsim.player.panes[0].recording.at(arguments[0]).copies = []; kvsim.player.panes[0].draw()", index)
        assert set(page.run(PAINTED)) == {block_id for row in frames[index]["rows"].values() for block_id in row}


def test_chosen_request_shows_its_table(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    recording = recording_of(page)
    frames = list(frames_of(recording))
    index = len(frames) // 2
    page.seek(index)
    frame = frames[index]
    request = recording["sequences"][next(iter(frame["rows"]))][0]
    Select(page.find("#request")).select_by_value(recording["requests"][request])
    tables = [table for seq, table in frame["rows"].items() if recording["sequences"][seq][0] == request]
    shown = page.run(
        "return [...document.querySelectorAll('#table .chips')].map("
        "list => [...list.children].map(chip => [Number(chip.dataset.logical), Number(chip.dataset.block)]))"
    )
    assert shown == [[list(entry) for entry in enumerate(table)] for table in tables]
    assert page.run("return kvsim.player.chosen") == recording["requests"][request]


def test_chosen_region_is_the_request_s(open_page: Callable[[str], Page]) -> None:
    page = open_page("orca-pow2")
    recording = recording_of(page)
    frames = list(frames_of(recording))
    page.seek(5)
    seq, (start, length, size) = next(iter(frames[5]["rows"].items()))
    Select(page.find("#request")).select_by_value(recording["requests"][recording["sequences"][seq][0]])
    chips = page.run(
        "return [...document.querySelector('#table .chips').children].map("
        "chip => [Number(chip.dataset.start), Number(chip.dataset.slots)])"
    )
    assert chips[0] == [start, frames[5]["tokens"][seq]]
    assert sum(slots for _, slots in chips) == size >= length


def test_copy_of_a_fork_is_seen(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    index, frame = next((index, frame) for index, frame in enumerate(frames_of(recording_of(page))) if frame["copies"])
    page.seek(index)
    shown = ", ".join(f"{src} → {dst}" for src, dst in frame["copies"][-6:])
    assert page.find(".copies").text.endswith(shown)
    (_, dst) = frame["copies"][-1]
    edge = page.run(READ + "return pixel(pane.cellOf(arguments[0]), 0.06, 0.5);", dst)
    assert max(edge) < 60, "the copied block has no dark frame"
    page.run("kvsim.player.panes[0].hover(kvsim.player.panes[0].cellOf(arguments[0]))", dst)
    assert f"copied from block {frame['copies'][-1][0]}" in page.find(".readout").text


def test_a_block_tells_its_life(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    assert page.result.out is not None
    events = [event for event in read_csv(page.result.out / "events.csv") if event.block_id == 7]
    told = page.run("return kvsim.lifeOf(7)")
    taken = [event for event in told if event["code"] == "t"]
    expected = [event for event in events if event.event == "taken"]
    assert [event["request"] for event in taken] == [f"request {event.request_id}" for event in expected]
    assert [event["us"] for event in taken] == [event.t_ns // 1000 for event in expected]
    page.run("kvsim.player.panes[0].hover(7)")
    assert page.find(".readout").text.startswith("Block 7:")
    assert f"taken by request {expected[0].request_id}" in page.find(".life").text


def test_keyboard_alone_is_enough(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    page.tab_to("play")
    page.press(" ")
    assert page.find("#play").get_attribute("aria-pressed") == "true"
    page.press(" ")
    assert page.find("#play").get_attribute("aria-pressed") == "false"
    page.tab_to("clock")
    page.press(Keys.HOME)
    assert page.run("return kvsim.player.panes[0].frame") == 0
    page.press(*[Keys.ARROW_RIGHT] * 6)
    assert page.run("return kvsim.player.panes[0].frame") == 6
    assert page.find("#clock").get_attribute("aria-valuetext") == page.find("#time").text
    page.press(" ")
    assert page.run("return kvsim.player.isPlaying")
    page.press(" ")
    page.run("kvsim.player.seek(6)")
    page.tab_to("canvas")
    page.press(Keys.HOME)
    assert page.find(".readout").text.startswith("Block 0:")
    page.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert page.find(".readout").text.startswith("Block 2:")
    page.press(Keys.ENTER)
    state = page.run("return kvsim.stateAt(6)")
    assert page.run("return kvsim.player.chosen") in state["blocks"]["2"]["owners"]
    assert page.find("#table .chips li").text
    page.press(Keys.ESCAPE)
    assert page.run("return kvsim.player.chosen") is None


def test_playing_moves_the_slider(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    Select(page.find("#speed")).select_by_value("6")
    page.find("#play").click()
    page.wait_for("return kvsim.player.index >= 3")
    page.find("#play").click()
    stopped = page.run("return kvsim.player.index")
    assert int(page.find("#clock").get_attribute("value")) == stopped


def test_strip_leads_to_an_instant(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    assert page.run("return kvsim.player.index") == page.run("return kvsim.player.busiest()")
    page.run("scrollTo(0, 0)")
    page.find("#overview").click()
    times = page.run("return kvsim.player.clock")
    index = page.run("return kvsim.player.index")
    middle = (times[0] + times[-1]) / 2
    assert times[index] <= middle * 1.01
    assert times[index + 1] >= middle * 0.99


def test_two_memories_on_one_clock(browser: Any, compared: CompareResult) -> None:
    browser.get_log("browser")
    browser.get(f"file://{compared.out}/report.html")
    page = Page(browser, compared.runs["paged"])
    assert page.run("return kvsim.engines") == list(ENGINES)
    num_ticks = page.run("return kvsim.player.clock.length")
    assert compared.out is not None
    events = [read_csv(compared.out / engine / "events.csv") for engine in ENGINES]
    for tick in instants(num_ticks, 5):
        page.seek(tick)
        now = page.run("return kvsim.player.clock[kvsim.player.index]")
        for place in (0, 1):
            state = page.run("return kvsim.stateAt(kvsim.player.panes[arguments[0]].frame, arguments[0])", place)
            assert state["t_ns"] <= now
            shown = {int(block_id): block["owners"] for block_id, block in state["blocks"].items()}
            assert shown == holders_at(events[place], state["t_ns"])
    Select(page.find(".pane:nth-child(2) select")).select_by_visible_text("paged")
    assert page.run("return kvsim.player.panes[1].recording.engine") == "paged"
    assert browser.get_log("browser") == []


def test_light_dark_and_narrow(open_page: Callable[[str], Page]) -> None:
    page = open_page("orca-pow2")
    backgrounds = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        backgrounds.append(page.run("return getComputedStyle(document.body).backgroundColor"))
        paper = page.run("return getComputedStyle(document.documentElement).getPropertyValue('--page').trim()")
        page.wait_for("return kvsim.player.colors.page === arguments[0]", paper)
    assert backgrounds == ["rgb(255, 255, 255)", "rgb(22, 24, 27)"]
    size = {"width": 600, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    # The new width is laid out when the browser comes to it.
    page.wait_for("return document.documentElement.scrollWidth <= arguments[0]", 600)
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_long_names_and_many_columns_stay_on_a_narrow_page(browser: Any, tmp_path: Path) -> None:
    """Words break, and a table of many engines is moved sideways instead of being squeezed into a column of letters."""
    name = "x" * 300
    requests = [{"id": name, "prompt_tokens": 9, "output_tokens": 5}]
    scenario = {**BASE, "name": "y" * 150, "workload": {"requests": requests}}
    engines = ("paged", "vllm-v0", "vllm-v1", "vllm-v1-async", "orca-max", "orca-pow2", "orca-oracle", "static")
    result = compare(scenario, engines, out=tmp_path / "out", options=Options(plots=False, report=True))
    browser.get(f"file://{result.out}/report.html")
    page = Page(browser, result.runs["paged"])
    page.run("kvsim.player.select(arguments[0]); kvsim.player.panes[0].hover(0)", name)
    assert name in page.find("#table").text
    size = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.wait_for("return document.documentElement.scrollWidth <= arguments[0]", 420)
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    narrowest = "return Math.min(...[...document.querySelectorAll('.scroll td:last-child')].map(e => e.clientWidth))"
    assert page.run(narrowest) >= 240


def test_a_map_of_very_many_blocks_is_a_picture(browser: Any, tmp_path: Path) -> None:
    """Not a tower of cells: half a million blocks fit on a screen, and behind the last one nothing is painted."""
    scenario = {**BASE, "memory": {"num_gpu_blocks_override": 500_001}}
    result = run(scenario, out=tmp_path / "out", options=Options(plots=False, report=True))
    browser.get(f"file://{result.out}/report.html")
    page = Page(browser, result)
    assert page.run("return kvsim.player.panes[0].canvas.clientHeight") < 700
    read = """
    const pane = kvsim.player.panes[0], {size, columns} = pane.layout, scale = devicePixelRatio;
    const at = (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size].map((place) => place * scale);
    return arguments[0].map((cell) => [...pane.canvas.getContext("2d").getImageData(...at(cell), 1, 1).data]);
    """
    state = page.run("return kvsim.stateAt(kvsim.player.panes[0].frame)")
    used, free, last, beyond = page.run(read, [int(next(iter(state["blocks"]))), 400_000, 500_000, 500_001])
    assert used != free == last
    assert beyond[3] == 0


def test_one_of_a_kind_is_no_plural(browser: Any, tmp_path: Path) -> None:
    requests = [{"id": "a", "prompt_tokens": 5, "output_tokens": 1}]
    result = run({**BASE, "workload": {"requests": requests}}, out=tmp_path / "out", options=Options(report=True))
    browser.get(f"file://{result.out}/report.html")
    page = Page(browser, result)
    assert "its only step is a frame" in page.find("#sampling").text
    page.run("kvsim.player.panes[0].hover(1)")
    assert page.find(".readout").text.startswith(
        "Block 1: 1 of 4 slots filled, token 4 of request a (logical block 1)."
    )


def test_controls_have_names(open_page: Callable[[str], Page]) -> None:
    page = open_page("paged")
    nameless = page.run(
        "return [...document.querySelectorAll('button, select, input, canvas, img')].filter(element => !("
        "element.getAttribute('aria-label') || element.alt || element.labels?.length || element.textContent.trim()"
        ")).map(element => element.outerHTML)"
    )
    assert nameless == []
    assert (
        page.run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0
    )


def test_names_are_text_and_nothing_else(browser: Any, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    requests = [{"id": name, "prompt_tokens": 9, "output_tokens": 5}]
    scenario = {**BASE, "name": "a <b>", "engine": "paged", "workload": {"requests": requests}}
    result = run(scenario, out=tmp_path / "out", options=Options(plots=False, report=True))
    browser.get_log("browser")
    browser.get(f"file://{result.out}/report.html")
    page = Page(browser, result)
    Select(page.find("#request")).select_by_value(name)
    assert name in page.find("#table").text
    assert page.find("h1").text == "kvsim: a <b>"
    assert browser.get_log("browser") == []
