"""Pictures of the live page at the end of the demo's burst: `docs/page.png`, `docs/page-dark.png`.

`python -m benchmarks.page_pictures [--out docs] [--duration-s 75]` plays `jmoe demo`, which takes
some three minutes and wants a quiet machine, and opens its server's page shortly before the last
run ends: the page has the five minutes before, so that one sees the burst without brownout and with
it. Needs Debian's `chromium`, and Playwright (the extra `dev`).
"""

import argparse
import asyncio
import re
import shutil
import sys
from pathlib import Path

from playwright.async_api import async_playwright

from serving.bench.variants import PAIR, VARIANTS

BEFORE_THE_END_S = 6.0
"""Arrivals go on for so long when the page is opened; a browser that is open costs the run time."""
LOOKS = {"page.png": "light", "page-dark.png": "dark"}
VIEW = {"width": 1360, "height": 1000}


async def take_pictures(out: Path, duration_s: float) -> None:
    """Plays the demo and photographs its page. Raises RuntimeError where the demo ends before."""
    demo = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "serving.bench.demo",
            "--pairs",
            "1",
            "--segment-s",
            str(duration_s),
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        url = await _wait_for_line(demo, r"live page: (\S+)")
        await _wait_for_line(demo, f"playing: pair 1, {VARIANTS[PAIR[-1]].label}$")
        await asyncio.sleep(duration_s - BEFORE_THE_END_S)
        await _photograph(url, out)
        await _wait_for_line(demo, r"results: (\S+)")
    finally:
        if demo.returncode is None:
            demo.terminate()
            await demo.wait()


async def _wait_for_line(demo: asyncio.subprocess.Process, pattern: str) -> str:
    """Passes lines on until one has the pattern; returns its last group, or all of it."""
    assert demo.stdout is not None
    async for line in demo.stdout:
        text = line.decode().rstrip()
        print(text, flush=True)
        if found := re.search(pattern, text):
            return found[found.re.groups]
    raise RuntimeError(f"the demo ended with status {await demo.wait()} before {pattern!r}")


async def _photograph(url: str, out: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("there is no chromium: apt-get install chromium")
    async with async_playwright() as driver:
        # Root has no sandbox of a user's; the page is our own.
        browser = await driver.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = await browser.new_page(viewport=VIEW)
        await page.goto(url)
        await page.locator("#ramp-most", has_text="rows/s").wait_for()
        for name, scheme in LOOKS.items():
            await page.emulate_media(color_scheme=scheme)
            await page.wait_for_timeout(300)  # until the canvas has the other colours
            await page.screenshot(path=out / name, full_page=True)
            print(f"picture: {out / name}", flush=True)
        await browser.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_pictures", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures")
    parser.add_argument("--duration-s", type=float, default=75.0, help="of arrivals, for each run")
    args = parser.parse_args()
    try:
        asyncio.run(take_pictures(args.out, args.duration_s))
    except RuntimeError as error:
        sys.exit(f"no pictures: {error}")


if __name__ == "__main__":
    main()
