"""Makes page.png beside it: the page of vilonghorn.tools.web with a digit, in headless Chromium.

`python docs/interpret/page.py runs/digits data/digits/val/3/0059.png`, after pip install '.[web,test]' and, on Debian,
apt-get install chromium.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from vilonghorn.tools.loaded_model import load_model
from vilonghorn.tools.web import build_page, launch

run, image = sys.argv[1:]
target = Path(__file__).with_name("page.png")
blocks = build_page(load_model(run))
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    tab = browser.new_page(viewport={"width": 1100, "height": 800})
    tab.goto(launch(blocks))
    tab.set_input_files("input[type=file]", image)
    tab.wait_for_function("document.querySelector('#maps img')?.naturalWidth")
    tab.wait_for_load_state("networkidle")
    tab.screenshot(path=target, full_page=True)
    browser.close()
blocks.close()
Image.open(target).convert("RGB").quantize(128).save(target, optimize=True)
