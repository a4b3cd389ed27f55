"""The page of `phalanx report` in headless Chromium: no errors, nothing runs, nothing overflows."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from phalanx.cli.reporting.page import make_page
from tests.unit.cli.test_report import EVIL, evil_run, records, run_of

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
PATIENCE_S = 120.0  # for a browser's first start on a busy machine
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs Chromium, which is not installed")


@pytest.fixture
def browse(tmp_path):
    """Return a function that opens a page, and returns its DOM and what its console said."""

    def open_page(page, *, width=1400):
        path = tmp_path / "page.html"
        path.write_text(page, encoding="utf-8")
        ran = subprocess.run(
            [
                *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu"),
                *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
                *(f"--window-size={width},900", "--dump-dom", path.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]

    return open_page


def with_script(page, script):
    """Return the page without its policy, and with a script of the test's at its end."""
    page, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    assert count == 1
    return page.replace("</body>", f"<script>{script}</script></body>")


def test_the_page_says_nothing_on_the_console_and_runs_nothing_of_a_run(browse):
    dom, console = browse(make_page([evil_run(), evil_run("b")]))
    assert console == []
    assert len(re.findall("<script", dom)) == 1
    assert dom.count("<figure") >= 5
    assert EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in dom


def test_an_error_on_the_console_and_a_script_of_a_run_would_be_seen(browse):
    page = make_page([evil_run("a")])
    _, console = browse(with_script(page, "console.error('planted')"))
    assert any("planted" in line for line in console)
    unescaped = page.replace("<footer>", "<script>document.title = 'run'</script><footer>")
    dom, console = browse(unescaped)
    assert any("Content Security Policy" in line for line in console)  # the second line of defence
    assert "<title>run</title>" not in dom


def test_a_place_that_is_pointed_at_shows_its_values(browse):
    script = """
        for (const plot of document.querySelectorAll(".plot")) {
          const box = plot.querySelector(".area").getBoundingClientRect();
          const place = { clientX: box.left + box.width * 9 / 19, clientY: box.top + 5 };
          plot.dispatchEvent(new PointerEvent("pointermove", place));
        }"""
    lines = records(20)
    for line in lines:
        if line["kind"] == "step":
            line["learning_rates"] = [0.5 / line["step"]]
    dom, console = browse(with_script(make_page([run_of(lines, name=EVIL)]), script))
    assert console == []
    tips = re.findall(r'<div class="tip".*?</div></div>', dom)
    assert len(tips) == 5
    escaped = EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert "<b>step 10</b>" in tips[0]
    assert f"{escaped}: 0.1<" in tips[0]
    assert f"{escaped}, validation: 70 %" in tips[1]
    assert f"{escaped}: 0.05<" in tips[2]
    assert "replica 1: 80 % busy" in tips[4]


def test_arrow_keys_walk_through_a_chart(browse):
    script = """
        const plot = document.querySelector(".plot");
        for (const key of ["ArrowLeft", "ArrowLeft", "ArrowRight", "ArrowRight", "ArrowRight"])
          plot.dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));"""
    dom, _ = browse(with_script(make_page([run_of(records(20))]), script))
    (tip,) = re.findall(r'<div class="tip".*?</div></div>', dom)
    assert "<b>step 20</b>" in tip


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(browse, width):
    """Only tables may be, which can be moved by themselves."""
    script = f"""
        document.documentElement.style.width = "{width}px";
        const wide = [...document.querySelectorAll("body *")].filter(
          (each) => !each.closest(".wide") && each.getBoundingClientRect().right > {width} + 1);
        document.title = `${{document.querySelectorAll("figure").length}} charts, too wide: `
          + wide.map((each) => each.tagName + each.className).join();"""
    runs = [evil_run("a-name-without-an-end-" * 9), *(evil_run(str(number)) for number in range(8))]
    dom, _ = browse(with_script(make_page(runs), script))
    assert re.search(r"<title>\d+ charts, too wide: </title>", dom), re.search("<title>.*?<", dom)
