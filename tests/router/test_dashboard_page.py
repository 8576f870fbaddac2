"""The dashboard's page in headless Chromium: it shows what the gateway tells, on every screen and by keyboard."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, async_playwright, expect

from router.config import GatewayConfig
from router.gateway.text import Text
from router.tenants import hashed
from tests.router.dashboards import Played, body, cluster
from tests.router.serving import serving

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: tests/browser.sh installs it")
KEY = "hw-chief-0123456789"
STEM = "The river rises in the hills and goes to the sea. " * 6
KV = "KV 20\u00a0% in use, 50\u00a0% kept for later"
EXPECTED = ("401 (Unauthorized)", "ERR_INTERNET_DISCONNECTED")
SCREENS = {"wide": (1280, 860), "narrow": (390, 844)}


@asynccontextmanager
async def browsing(text: Text, keys: Path | None = None, **more: Any) -> AsyncIterator[tuple[Page, str, Played]]:
    """A page of a browser in front of a gateway that has answered some prompts. Whatever it complains about, or asks of
    anybody else, fails the test; that there is no key, or no gateway, is no complaint."""
    app, played = cluster(text, keys)
    wrong: list[str] = []
    async with serving(app, GatewayConfig()) as (port, _), async_playwright() as driver:
        url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers) as http:
            for end in ("Where does it end?", "Why is it cold?", "Where does it end? And why?"):
                assert (await http.post("/v1/completions", json=body(STEM + end))).status_code == 200
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**more)
        page.set_default_timeout(10_000)
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda asked: None if asked.url.startswith(url) else wrong.append(asked.url))
        await page.goto(f"{url}/dashboard")
        yield page, url, played
        await browser.close()
    assert [one for one in wrong if not any(fine in one for fine in EXPECTED)] == []


async def fits(page: Page) -> None:
    """Nothing has to be scrolled sideways."""
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_a_person_sees_who_serves_what_and_how_much_is_saved(text: Text) -> None:
    """At once on a wide screen and on a narrow one, and finds the rest by keyboard alone."""
    async with browsing(text, viewport={"width": 1280, "height": 860}) as (page, url, played):
        played.gate.clear()
        await expect(page.locator("#status")).to_have_text("live")
        saved = page.locator("#headline [data-key='Tokens saved'] .figure")
        await expect(saved).to_have_text("48")
        for worker in ("prefill-0", "prefill-1", "decode-0"):
            card = page.locator(f".worker[data-key='{worker}']")
            await expect(card.locator(".kv")).to_have_attribute("aria-label", KV)
        await expect(page.locator("#ring .shares li")).to_have_count(2)
        await expect(page.locator(".flow").first).to_be_attached()
        await expect(page.locator("#charts figure")).to_have_count(4)
        async with httpx.AsyncClient(base_url=url) as http:
            asked = asyncio.create_task(http.post("/v1/completions", json=body(STEM + "What is it called?", 9)))
            line = page.locator(".worker[data-key='decode-0'] .serves button").first
            await expect(line).to_contain_text("What is it called?")
            await expect(line).to_contain_text("1 token")
            played.gate.set()
            await asked
        await fits(page)
        for width, height in SCREENS.values():
            await page.set_viewport_size({"width": width, "height": height})
            await fits(page)
        await page.set_viewport_size({"width": 1280, "height": 860})
        await _by_keyboard(page)


async def _by_keyboard(page: Page) -> None:
    await page.locator("#tab-overview").focus()
    await page.keyboard.press("ArrowRight")
    tree = page.locator("#tree [role=treeitem]")
    await expect(tree).to_have_count(4)  # one end is the beginning of another
    await expect(page.locator("#tab-cache")).to_be_focused()
    await page.locator("#tree [tabindex='0']").focus()
    first = await page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert "used 4 times" in first
    await page.keyboard.press("ArrowRight")
    assert await page.evaluate("document.activeElement.getAttribute('aria-level')") == "3"
    await page.keyboard.press("ArrowLeft")
    await page.keyboard.press("Enter")
    await expect(page.locator("#crumbs button")).to_have_count(3)
    await expect(page.locator("#tree-detail pre")).to_contain_text("The river rises in the hills")
    await page.locator("#tree [tabindex='0']").focus()
    await page.keyboard.press("Backspace")
    await expect(page.locator("#crumbs button")).to_have_count(2)
    await fits(page)
    await page.locator("#tab-cache").focus()
    await page.keyboard.press("ArrowRight")
    await expect(page.locator("#request-list tbody tr")).to_have_count(4)
    await page.locator("#request-list tbody button").nth(1).focus()
    await page.keyboard.press("Enter")
    detail = page.locator("#request-detail")
    await expect(detail).to_contain_text("Where does it end? And why?")
    for told in ("KV has arrived at decode-0", "first token", "believed cached", "home"):
        await expect(detail).to_contain_text(told)
    await fits(page)


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", sorted(SCREENS))
async def test_every_view_fits_and_can_be_read(text: Text, scheme: Any, screen: str) -> None:
    """Also with more workers and longer names than were thought of; text has the contrast that it needs."""
    width, height = SCREENS[screen]
    async with browsing(text, viewport={"width": width, "height": height}, color_scheme=scheme) as (page, _, _played):
        for view in ("Overview", "Cache", "Requests"):
            await page.get_by_role("tab", name=view).click()
            await expect(page.locator("#status")).to_have_text("live")
            await fits(page)
            assert await page.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = rgb(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *:not(svg *)")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest(".over, .skip")) continue;
    const [a, b] = [rgb(getComputedStyle(element).color), ground(element)].map(light).sort((x, y) => y - x);
    const what = `${element.tagName}.${element.className}: ${element.textContent.slice(0, 30)}`;
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(what);
  }
  return poor;
}"""


@pytest.mark.long
async def test_a_key_is_asked_for_and_kept_in_the_tab_alone(text: Text, tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(json.dumps({"tenants": {"chief": {"keys": [hashed(KEY)], "operator": True}}}))
    async with browsing(text, file) as (page, _, _played):
        await expect(page.locator("#gate")).to_be_visible()
        await expect(page.locator("#overview")).to_be_hidden()
        for key, told in (("wrong-key", "That key is not known here."), (KEY, "")):
            await page.get_by_label("API key").fill(key)
            await page.keyboard.press("Enter")
            await expect(page.locator("#gate-error")).to_have_text(told)
        await expect(page.locator("#status")).to_have_text("live")
        await expect(page.locator("#gate")).to_be_hidden()
        assert KEY not in page.url
        assert await page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        await page.reload()
        await expect(page.locator("#status")).to_have_text("live")
        await page.get_by_role("button", name="Forget key").click()
        await expect(page.locator("#gate")).to_be_visible()


@pytest.mark.long
async def test_a_gateway_that_goes_away_and_comes_back(text: Text) -> None:
    async with browsing(text) as (page, _url, _played):
        await expect(page.locator("#status")).to_have_text("live")
        await page.context.set_offline(True)
        await expect(page.locator("#status")).to_contain_text("reconnecting")
        await expect(page.locator("#headline [data-key='Tokens saved'] .figure")).to_have_text("48")
        await page.context.set_offline(False)
        await expect(page.locator("#status")).to_have_text("live")
