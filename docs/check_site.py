"""Looks at every page of the built site in Chromium, at the width of a desktop and of a phone.

    python docs/check_site.py SITE [--screenshots FOLDER]

On no page may a table cell break a name in the middle, a picture be missing, squeezed or cut, anything but a table or
code scroll sideways, or a request go to somebody else. Needs the Python package playwright and Debian's chromium (or
another one, named in CHROMIUM); playwright's own browsers are not used.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import os
import pathlib
import shutil
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = {"desktop": 1280, "phone": 390}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
LOOK = """() => {
  const faults = [], edge = document.documentElement.clientWidth;
  const scrolls = e => ["auto", "scroll"].includes(getComputedStyle(e).overflowX);
  const inScroll = e => e && (scrolls(e) || inScroll(e.parentElement));

  // A name is what a reader would copy. It is broken if its characters lie on more than one line.
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const text = words.currentNode;
    if (!text.parentElement.closest("article td, article th")) continue;
    for (const found of text.data.matchAll(/[A-Za-z_][\\w.]*/g)) {
      const range = document.createRange();
      range.setStart(text, found.index);
      range.setEnd(text, found.index + found[0].length);
      const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
      if (lines.size > 1) faults.push(`a table breaks "${found[0]}"`);
    }
  }

  for (const image of document.querySelectorAll("article img:not(.twemoji *)")) {
    const name = image.getAttribute("src"), box = image.getBoundingClientRect();
    if (!image.complete || !image.naturalWidth) { faults.push(`${name} is missing`); continue; }
    if (Math.abs(box.width / box.height / (image.naturalWidth / image.naturalHeight) - 1) > 0.02)
      faults.push(`${name} is squeezed`);
    if (box.right > edge + 1 || box.left < -1) faults.push(`${name} leaves the page`);
    // A picture that was cropped through what it shows has ink on its outermost pixels.
    const width = Math.max(image.naturalWidth, 1000);
    const height = Math.round(width / image.naturalWidth * image.naturalHeight);
    const paper = Object.assign(document.createElement("canvas"), {width, height}).getContext("2d");
    paper.drawImage(image, 0, 0, width, height);
    const strips = [[0, 0, width, 1], [0, height - 1, width, 1], [0, 0, 1, height], [width - 1, 0, 1, height]];
    const inked = (value, i, all) => Math.abs(value - all[i % 4]) > 8;
    if (strips.some(strip => paper.getImageData(...strip).data.some(inked)))
      faults.push(`${name} is cut: its outermost pixels show something`);
  }

  if (document.documentElement.scrollWidth > edge) {
    faults.push("the page scrolls sideways");
    for (const e of document.querySelectorAll("article *"))
      if (e.getBoundingClientRect().right > edge + 1 && !inScroll(e))
        faults.push(`<${e.localName} class="${e.className}"> is too wide: ${e.textContent.trim().slice(0, 40)}`);
  }
  for (const e of document.querySelectorAll("article *"))
    if (scrolls(e) && e.scrollWidth > e.clientWidth + 1 && !e.querySelector("table") && !e.closest("table, pre"))
      faults.push(`<${e.localName} class="${e.className}"> scrolls sideways`);
  return [...new Set(faults)];
}"""


def browser() -> str | None:
    """Path of the browser, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def served(site: pathlib.Path) -> Iterator[str]:
    """Serve the folder to this machine; yields the address."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def look(site: pathlib.Path, screenshots: pathlib.Path | None = None) -> list[str]:
    """What is wrong, one line each.

    Args:
        site: folder that mkdocs built.
        screenshots: folder for a picture of every page at every width.
    """
    from playwright.sync_api import sync_playwright

    faults = []
    pages = sorted(path.parent.relative_to(site).as_posix() for path in site.rglob("index.html"))
    with served(site) as address, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser(), args=["--no-sandbox"])
        for device, width in WIDTHS.items():
            tab = chromium.new_page(viewport={"width": width, "height": 900})
            asked: list[str] = []
            tab.on("request", lambda request, asked=asked: asked.append(request.url))
            for page in pages:
                asked.clear()
                tab.goto(f"{address}{page}/")
                found = tab.evaluate(LOOK)
                found += [f"asks somebody else: {url}" for url in asked if not url.startswith((address, "data:"))]
                faults += [f"{page} on a {device}: {fault}" for fault in found]
                if screenshots:
                    name = f"{page.replace('/', '-').strip('.') or 'index'}-{device}.png"
                    tab.screenshot(path=screenshots / name, full_page=True)
            tab.close()
        chromium.close()
    return faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("site", type=pathlib.Path)
    parser.add_argument("--screenshots", type=pathlib.Path)
    args = parser.parse_args()
    if browser() is None:
        sys.exit("needs a browser: apt-get install chromium, or name one in CHROMIUM")
    found = look(args.site, args.screenshots)
    print("\n".join(found) or "every page is right")
    sys.exit(bool(found))
