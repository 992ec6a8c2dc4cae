"""Takes the pictures of this folder: the pages of scenarios/quickstart.yaml, light and dark, in headless Chromium.

python docs/screenshots/take.py      (needs chromium, chromium-driver and selenium)
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

import kvsim

HERE = Path(__file__).resolve().parent
SCENARIO = HERE.parent.parent / "scenarios" / "quickstart.yaml"
ENGINES = ("paged", "orca-max", "orca-pow2")
WIDTH = 1100
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")

CHOOSE = """
const {player, stateAt} = window.kvsim;
const [pane] = player.panes, {sequences} = stateAt(pane.frame);
const longest = sequences.reduce((one, other) => (one.tokens > other.tokens ? one : other));
player.select(longest.request);
pane.hover(pane.cellOf(longest.table.at(-1)));
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        options = kvsim.Options(report=True)
        run = kvsim.run(SCENARIO, out=Path(temporary) / "run", options=options)
        compared = kvsim.compare(SCENARIO, ENGINES, out=Path(temporary) / "compare", options=options)
        browser = open_browser(temporary)
        for scheme in ("light", "dark"):
            shoot(browser, f"{run.out}/report.html", scheme, HERE / f"quickstart-{scheme}.png", CHOOSE)
            shoot(browser, f"{compared.out}/report.html", scheme, HERE / f"compare-{scheme}.png", "", height=1250)
        browser.quit()


def open_browser(profile: str) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}/profile"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def shoot(browser: Any, page: str, scheme: str, path: Path, script: str, height: int | None = None) -> None:
    """Save the page from its top, `height` pixels of it or all."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    resize(browser, 900)
    browser.get(f"file://{page}")
    browser.execute_script(script)
    resize(browser, height or browser.execute_script("return document.documentElement.scrollHeight"))
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    browser.save_screenshot(str(path))


def resize(browser: Any, height: int) -> None:
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


if __name__ == "__main__":
    main()
