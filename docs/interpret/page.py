"""Makes page.png beside it: the page of `vilonghorn web` with a digit, in headless Chromium.

`python docs/interpret/page.py runs/digits data/digits/val/3/0059.png`, after pip install '.[web,test]' and, on Debian,
apt-get install chromium.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

run, image = sys.argv[1:]
target = Path(__file__).with_name("page.png")
command = [sys.executable, "-m", "vilonghorn", "web", run]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
    address = re.search(r"http\S+", server.stdout.readline())[0]
    browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
    tab = browser.new_page(viewport={"width": 1100, "height": 800})
    tab.goto(address)
    tab.set_input_files("input[type=file]", image)
    tab.wait_for_function("document.querySelector('#maps img')?.naturalWidth")
    tab.wait_for_load_state("networkidle")
    tab.screenshot(path=target, full_page=True)
    browser.close()
    server.terminate()
Image.open(target).convert("RGB").quantize(128).save(target, optimize=True)
