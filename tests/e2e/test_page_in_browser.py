"""The live page in a real browser: Debian's `chromium`, driven by Playwright.

With JMOE_PICTURES=FOLDER each test leaves a picture of what it saw there.
"""

import asyncio
import contextlib
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from serving.config import BrownoutConfig, EngineConfig
from serving.errors import PermissionDenied, Unauthenticated
from serving.frontend.access import Caller
from serving.frontend.keys import Key
from serving.request import ModelBrownout

sys.path.append(str(Path(__file__).parents[1] / "serving"))  # fake_engine
sys.path.append(str(Path(__file__).parent))

playwright = pytest.importorskip(
    "playwright.async_api", reason="Playwright is not installed: it comes with the extra `dev`"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
    pytest.mark.deep,
]

from keyed import KeysFile  # noqa: E402
from openai_served import serving_http  # noqa: E402
from page_scene import HAPPENED, LAYERS, ROUTED, UNITED, Scene  # noqa: E402

DESKTOP, PHONE = {"width": 1360, "height": 1000}, {"width": 390, "height": 844}
WAIT_MS = 20_000
WIDTHS = """Array.from(
    document.querySelectorAll("#charts path.line.prefill, #charts path.line.decode"),
    (path) => path.getBBox().width / path.ownerSVGElement.clientWidth,
)"""
REFUSED = """(() => {
    const mark = document.querySelector("#strip rect.refused");
    const width = (one) => one.getBoundingClientRect().width;
    return [width(mark), width(mark.ownerSVGElement), mark.querySelector("title").textContent];
})()"""
"""Read at once, as the strip is drawn anew with every sample."""


@pytest.fixture(scope="module")
def pictures():
    folder = os.environ.get("JMOE_PICTURES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) if folder else None


@contextlib.asynccontextmanager
async def browsing(scheme="light", viewport=DESKTOP, quiet=True, **options):
    """Yields a browser's page. `quiet`: fails at the end if the console reported an error."""
    said: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            context = await browser.new_context(color_scheme=scheme, viewport=viewport, **options)
            page = await context.new_page()
            page.set_default_timeout(WAIT_MS)
            page.on(
                "console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None
            )
            page.on("pageerror", lambda error: said.append(str(error)))
            yield page
        finally:
            await browser.close()
    if quiet:
        assert not said


async def opened(page, scene):
    await page.goto(scene.url)
    await page.locator("main").wait_for(state="visible")


async def text_of(page, selector):
    return await page.locator(selector).inner_text()


def tile(page, title):
    return page.locator("#tiles div", has=page.get_by_text(title, exact=True)).locator("dd").first


async def shoot(page, pictures, name):
    if pictures is not None:
        await page.evaluate("scrollTo(0, 0)")
        await page.screenshot(path=pictures / f"{name}.png", full_page=True)


async def going_on(scene):
    """Plays the time after the burst, second by second as the server samples."""
    at = 0
    while True:
        at += 1
        scene.second(at)
        await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def live_scene(**settings):
    async with Scene(**settings) as scene:
        await scene.play()
        task = asyncio.create_task(going_on(scene))
        yield scene
        task.cancel()


@pytest.mark.parametrize(
    ("name", "scheme", "viewport"),
    [("light", "light", DESKTOP), ("dark", "dark", DESKTOP), ("phone", "dark", PHONE)],
)
async def test_a_burst_is_seen_and_goes_on(name, scheme, viewport, pictures):
    async with live_scene() as scene, browsing(scheme, viewport) as page:
        await opened(page, scene)
        assert await text_of(page, "#status") == "ready"
        wide = await page.evaluate("document.documentElement.scrollWidth")
        assert wide <= viewport["width"], "it does not fit the width"
        for title in ("Time to first token, P90", "Expert visits degraded", "KV pages used"):
            await page.get_by_role("img", name=re.compile(rf"{title}.*\d")).wait_for()
        # A line and an area over most of the width, not a stump of one sample.
        widths = await page.evaluate(WIDTHS)
        assert len(widths) == 4
        assert min(widths) > 0.4
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (scheme == "dark")
        seen = set()
        async with asyncio.timeout(20):
            while len(seen) < 3:  # values move
                seen.add(await tile(page, "TTFT P90").inner_text())
                await asyncio.sleep(0.2)
        await page.locator("#ramp-most", has_text="rows/s").wait_for()
        await page.wait_for_function(
            "!document.querySelector('#ramp-most').textContent.startsWith('0 ')"
        )
        await shoot(page, pictures, name)


async def test_the_form_by_keyboard_and_refusals_beside_their_control(pictures):
    async with live_scene() as scene, browsing(quiet=False) as page:
        await opened(page, scene)
        engine = scene.engine
        await page.locator("#strategy").focus()
        await page.keyboard.press("End")  # full
        for _ in range(20):
            if await page.evaluate("document.activeElement.id") == "by-controller":
                break
            await page.keyboard.press("Tab")
        await page.keyboard.press("ArrowDown")  # by hand
        await page.locator("#prefill").focus()
        await page.keyboard.press("ControlOrMeta+A")
        await page.keyboard.type("101")
        await page.keyboard.press("Enter")
        await page.locator("#refusal", has_text="101").wait_for()
        assert await page.evaluate("document.activeElement.id") == "prefill"
        assert await page.locator("#prefill").get_attribute("aria-invalid") == "true"
        assert engine.brownout.strategy == "partial"
        await shoot(page, pictures, "refused")
        await page.keyboard.press("ControlOrMeta+A")
        await page.keyboard.type("70")
        assert await text_of(page, "#refusal") == ""
        await page.keyboard.press("Enter")
        await page.locator("#outcome", has_text="Applied").wait_for()
        assert engine.brownout.strategy == "full"
        assert not engine.brownout.salc_enabled
        assert engine.changes.prefill_threshold_percent == 70
        assert engine.changes.decode_threshold_percent is None  # it was not touched
        await page.locator("#ttft").fill("450")
        await page.keyboard.press("Enter")
        await page.locator("#apply:disabled").wait_for()
        async with asyncio.timeout(20):
            while engine.brownout.ttft_slo_s != 0.45:
                await asyncio.sleep(0.05)
        assert engine.changes.strategy is None


async def test_a_strategy_of_a_users_own_is_shown_by_name():
    own = "own.py:Mine"
    config = EngineConfig(brownout=BrownoutConfig(strategy=own))
    async with live_scene(engine=config) as scene, browsing() as page:
        scene.engine.brownout = replace(scene.engine.brownout, strategy=own)
        await opened(page, scene)
        await page.locator("#strategy option:checked", has_text=own).wait_for(state="attached")
        scene.engine.brownout = replace(scene.engine.brownout, strategy="full")
        await page.locator("#strategy option[value=full]:checked").wait_for(state="attached")
        await page.locator("#strategy").select_option(own)
        scene.engine.names[:] = ["bundled", "another"]  # what may be chosen is told again
        await page.locator("#model", has_text="2 models").wait_for()
        assert await page.locator("#strategy").input_value() == own
        assert await page.locator("#strategy option").count() == 4


async def test_edits_stay_while_the_server_goes_on_and_can_be_undone():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        await page.locator("#itl").fill("99")
        before = scene.page.live.count
        async with asyncio.timeout(20):
            while scene.page.live.count < before + 3:
                await asyncio.sleep(0.1)
        assert await page.locator("#itl").input_value() == "99"
        await page.locator("#reset").click()
        assert await page.locator("#itl").input_value() == "25"
        await page.locator("#itl").fill("")
        await page.keyboard.press("Enter")
        await page.locator("#refusal", has_text="number").wait_for()


async def test_what_a_change_lets_expect_is_asked_before_it_is_made_and_it_is_undone(pictures):
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        before = scene.engine.brownout
        await page.locator("#by-hand").check()
        await page.locator("#decode").fill("95")
        await page.locator("#try").click()
        whatif = page.locator("#whatif")
        await whatif.locator("caption", has_text="The objective of decode would not be").wait_for()
        decode = await whatif.locator("td:nth-child(3)").all_inner_texts()
        assert [one.split(" → ")[1] for one in decode] == ["95 %", "9.5 ms", "0.0200"]
        assert scene.engine.brownout.salc_enabled == before.salc_enabled  # nothing is changed
        assert await page.locator("#undo").is_hidden()
        await shoot(page, pictures, "whatif")
        await page.locator("#apply").click()
        await page.locator("#outcome", has_text="Applied").wait_for()
        assert await whatif.is_hidden()
        assert not scene.engine.brownout.salc_enabled
        await page.locator("#undo").focus()
        await page.keyboard.press("Enter")
        await page.locator("#outcome", has_text="Undone").wait_for()
        assert scene.engine.brownout.salc_enabled
        assert await page.locator("#undo").is_hidden()
        texts = page.locator("#event-list li")
        await texts.filter(has_text="salc_enabled from off to on").wait_for()
        await texts.filter(has_text="salc_enabled from on to off").wait_for()


async def test_what_happened_is_a_strip_on_the_time_axis_and_a_list():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        assert await page.locator("#strip rect.event").count() == len(HAPPENED)
        mark, whole, title = await page.evaluate(REFUSED)
        share = mark / (whole - 68)  # margins of the charts
        assert share == pytest.approx(110 / 300, abs=0.03)
        assert "258 refused for load" in title
        lines = await page.locator("#event-list li").all_inner_texts()
        assert "loaded law" in lines[0]  # the newest first
        scene.server.happened("settings", "<b>who</b> & what")
        await page.locator("#event-list li", has_text="<b>who</b> & what").wait_for()


async def test_who_is_late_degraded_or_refused_and_what_runs_for_longest():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        rows = page.locator("#who tbody tr")
        text = await rows.filter(has_text="alice").inner_text()
        assert re.search(r"alice\s+bundled\s+[\d,]+\s+\d+ %\s+\d+ %\s+0", text)
        assert re.search(r"batch\s+–\s+0\s+–\s+–\s+260", await rows.nth(2).inner_text())
        oldest = page.locator("#oldest tbody tr")
        assert await oldest.count() == 10
        first = await oldest.nth(0).inner_text()
        assert re.search(r"…mpl-00000000\s+alice, bundled\s+4\d(\.\d)? s\s+20\s+300", first), first


async def test_what_a_model_has_of_its_own_stands_beside_it():
    async with live_scene() as scene, browsing(viewport=PHONE) as page:
        law = ModelBrownout("law", itl_slo_s=0.05, floor_percent=60)
        scene.engine.names = ("base", "law")
        scene.engine.brownout = replace(scene.engine.brownout, models=(ModelBrownout("base"), law))
        await opened(page, scene)
        table = page.locator("#family")
        await table.locator("td", has_text="law").wait_for()
        heads = await table.locator("th").all_text_contents()
        cells = await table.locator("td").all_text_contents()
        rows = [
            dict(zip(heads, cells[at : at + len(heads)], strict=True)) for at in (0, len(heads))
        ]
        own = [(one["TTFT objective"], one["ITL objective"], one["Thresholds"]) for one in rows]
        assert own == [("as all", "as all", "0 % to 100 %"), ("as all", "50 ms", "60 % to 100 %")]
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


async def test_a_model_gets_objectives_and_bounds_of_its_own(pictures):
    async with live_scene() as scene, browsing(quiet=False, viewport=PHONE) as page:
        engine = scene.engine
        law = ModelBrownout("law", itl_slo_s=0.05, floor_percent=60)
        engine.names = ("base", "law")
        engine.brownout = before = replace(engine.brownout, models=(ModelBrownout("base"), law))
        await opened(page, scene)
        await page.locator("#strategy").select_option("zero")  # an edit of all models
        of = page.get_by_label("Of", exact=True)
        assert await of.locator("option").all_inner_texts() == ["all models", "base", "law"]
        await of.focus()
        await page.keyboard.press("End")
        assert await page.locator("#strategy").is_hidden()
        assert await page.locator("#apply").is_disabled()
        floor, ceiling = page.get_by_label("Threshold, at least"), page.locator("#ceiling")
        shown = [await one.input_value() for one in (page.locator("#itl"), floor, ceiling)]
        assert shown == ["50", "60", "100"]
        await ceiling.fill("40")
        await page.keyboard.press("Enter")
        await page.locator("#refusal", has_text="at most its ceiling_percent, 40").wait_for()
        assert await page.evaluate("document.activeElement.id") == "ceiling"
        assert await ceiling.get_attribute("aria-invalid") == "true"
        await shoot(page, pictures, "model")
        await page.locator("#itl").fill("0")
        await floor.fill("20")
        await page.locator("#try").click()
        await page.locator("#whatif caption").wait_for()
        assert engine.asked.model == "law"
        assert engine.brownout.models[1] == law  # nothing is changed
        await page.locator("#apply").click()
        await page.locator("#outcome", has_text="Applied").wait_for()
        mine = ModelBrownout("law", floor_percent=20, ceiling_percent=40)
        assert engine.brownout.models == (before.models[0], mine)
        assert engine.brownout.strategy == before.strategy
        await of.select_option("")
        assert await page.locator("#floor").is_hidden()
        assert await page.locator("#itl").input_value() == "25"
        await page.locator("#undo").click()
        await page.locator("#outcome", has_text="Undone").wait_for()
        assert engine.brownout.models == before.models
        await of.select_option("law")
        engine.brownout = replace(engine.brownout, models=before.models[:1])  # it is unloaded
        await of.wait_for(state="hidden")
        assert await page.locator("#strategy").is_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


async def test_latencies_are_shown_on_a_log_scale():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        figure = page.locator("figure.chart", has_text="Time to first token")
        before = await figure.locator("svg text.left").all_text_contents()
        assert before[0] == "0 ms"
        await page.get_by_label("Latency on a log scale").focus()
        await page.keyboard.press("Space")
        await page.wait_for_function(
            "document.querySelectorAll('figure.chart')[2].querySelector('text.left')"
            ".textContent !== '0 ms'"
        )
        ticks = await figure.locator("svg text.left").all_text_contents()
        values = [float(tick.split()[0]) * (1000 if tick.endswith(" s") else 1) for tick in ticks]
        assert len(values) >= 2
        assert all(value > 0 for value in values)
        marks = await figure.locator("svg text.left").all()
        heights = [float(await one.get_attribute("y")) for one in marks]
        slopes = [
            (b - a) / (math.log(w) - math.log(v))
            for a, b, v, w in zip(heights, heights[1:], values, values[1:], strict=False)
        ]
        assert max(slopes) - min(slopes) < 0.1  # equal ratios are equal distances


async def test_a_server_whose_brownout_is_exhausted_is_overloaded():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        why = "overloaded: brownout is exhausted, ITL P90 of 40 ms over its objective of 25 ms"
        scene.engine.brownout = replace(scene.engine.brownout, objective_state=why)
        await page.locator("#status", has_text="overloaded").wait_for()
        await page.locator("#banner", has_text=why).wait_for()


async def test_a_moment_is_looked_at_by_keyboard_and_by_pointer():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        back = page.get_by_label("Look back")
        await back.focus()
        for _ in range(3):
            await page.keyboard.press("PageDown")
        said = await back.get_attribute("aria-valuetext")
        assert "s ago" in said
        assert "TTFT P90" in said
        assert await page.locator(".cross").count() >= 6
        await page.keyboard.press("Escape")
        assert await back.get_attribute("aria-valuetext") == "now"
        box = await page.locator("#charts").bounding_box()
        await page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
        await page.locator("#moment", has_text="s ago").wait_for()
        await page.mouse.move(5, 5)
        await page.wait_for_function("document.querySelector('#moment').textContent === ''")


async def test_experts_are_read_cell_by_cell():
    async with live_scene() as scene, browsing() as page:
        await opened(page, scene)
        await page.wait_for_function("document.querySelector('#ramp-most').textContent.length > 6")
        await page.locator("#heat").focus()
        for _ in range(ROUTED + 1):
            await page.keyboard.press("ArrowRight")
        assert "united expert 0: about" in await text_of(page, "#experts-cell")
        for _ in range(LAYERS + 5):
            await page.keyboard.press("ArrowDown")
        assert f"Layer {LAYERS - 1}," in await text_of(page, "#experts-cell")
        box = await page.locator("#heat").bounding_box()
        await page.mouse.move(box["x"] + box["width"] - 3, box["y"] + 3)
        await page.locator(
            "#experts-cell", has_text=f"Layer 0, united expert {UNITED - 1}"
        ).wait_for()


class Keys:
    """One admin's key and one user's."""

    def caller(self, authorization):
        if authorization == "Bearer user":
            return Caller("u", Key(""))
        if authorization != "Bearer root":
            raise Unauthenticated("there is no such key; ask your operator for one")
        return Caller("ops")


async def test_the_key_is_asked_for_kept_in_the_tab_and_forgotten(pictures):
    async with live_scene() as scene, browsing(quiet=False) as page:
        scene.server.access = Keys()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        await page.goto(scene.url)
        await page.locator("#key").wait_for(state="visible")
        assert await page.evaluate("document.activeElement.id") == "key-value"
        for key, says in (("wrong", "no such key"), ("user", "no admin key")):
            await page.keyboard.type(key)
            await page.keyboard.press("Enter")
            await page.locator("#key-refusal", has_text=says).wait_for()
        await shoot(page, pictures, "key")
        await page.keyboard.type("root")
        await page.keyboard.press("Enter")
        await page.locator("main").wait_for(state="visible")
        stored = (
            "JSON.stringify([localStorage.length, document.cookie, Object.values(sessionStorage)])"
        )
        assert await page.evaluate(stored) == '[0,"",["root"]]'
        await page.locator("#strategy").select_option("zero")
        await page.locator("#apply").click()
        await page.locator("#outcome", has_text="Applied").wait_for()
        await page.reload()
        await page.locator("main").wait_for(state="visible")
        await page.get_by_role("button", name="Forget the key").click()
        await page.locator("#key").wait_for(state="visible")
        assert await page.evaluate("sessionStorage.length") == 0
        assert not [url for url in asked if "root" in url]
    with pytest.raises(PermissionDenied):
        Keys().caller("Bearer user").require_admin()


async def test_a_server_that_loads_fails_and_comes_back_is_followed(pictures):
    async with browsing(quiet=False) as page:
        async with Scene(exit_on_failure=False) as scene:
            await opened(page, scene)
            await page.locator("#banner", has_text="loading its model").wait_for()
            assert await page.locator("#apply").is_disabled()
            await shoot(page, pictures, "loading")
            await scene.play()
            await page.locator("#status", has_text="ready").wait_for()
            await page.locator("#controller option").first.wait_for(state="attached")
            assert await page.locator("#way").input_value() == "8"
            scene.engine.fail("a step took longer than 60 s (engine.watchdog_s)")
            await page.locator("#banner", has_text="a step took longer than 60 s").wait_for()
            await shoot(page, pictures, "failed")
            await page.locator("#itl").fill("99")
            port = scene.page.port
        await page.locator("#link", has_text="Trying again in").wait_for()
        await shoot(page, pictures, "disconnected")
        async with Scene(admin_http_port=port):
            await page.locator("#banner", has_text="loading its model").wait_for()
            assert await page.locator("#apply").is_disabled()  # what was edited waits
        async with live_scene(admin_http_port=port):
            await page.locator("#status", has_text="ready").wait_for()
            await page.wait_for_function("document.querySelector('#link').textContent === ''")
            assert await page.locator("#banner").is_hidden()
            assert await page.locator("#itl").input_value() == "99"
            await page.locator("#apply").click()
            await page.locator("#outcome", has_text="Applied").wait_for()


async def test_swagger_asks_with_a_key_and_nothing_but_the_server(tmp_path, pictures):
    """`/docs`: without a key the server refuses; "Authorize" takes one, and the example runs."""
    keys = KeysFile(tmp_path / "keys.yaml", alice={})
    async with (
        serving_http(keys_file=str(keys.path), served_model_name="bundled") as s,
        browsing(quiet=False) as page,
    ):
        asked, wrong = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        await page.goto(f"http://{s.address}/docs")
        call = page.locator("#operations-default-completions_v1_completions_post")
        await call.locator(".opblock-summary-control").click()
        execute = call.get_by_role("button", name="Execute")
        await execute.click()
        await call.locator(".live-responses-table .response-col_status", has_text="401").wait_for()
        assert not [text for text in wrong if "401" not in text]
        wrong.clear()
        await page.locator(".auth-wrapper .authorize").click()
        await page.locator("#auth-bearer-value").fill(keys.text("alice"))
        await page.locator(".auth-btn-wrapper .authorize").click()
        await page.locator(".auth-btn-wrapper .btn-done").click()
        await execute.click()
        await call.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
        await shoot(page, pictures, "swagger")
        assert not wrong
        assert {url.split("/")[2] for url in asked if not url.startswith("data:")} == {s.address}
        assert await page.evaluate("localStorage.length + document.cookie.length") == 0
