"""The pictures of the pages in docs/: two short runs, taken by a browser at the width of a screen and of a phone.

    python benchmarks/screenshots.py

Trains adapters of two ranks for a minute each on a CPU, and writes docs/report_1280.png and docs/report_390.png, and
for the data page, the plan and the comparison the wide picture alone. Needs Chromium and the package playwright.
"""

from __future__ import annotations

import shutil
import tempfile
from io import BytesIO
from pathlib import Path

import harness
from PIL import Image
from playwright.sync_api import Browser, sync_playwright

DOCS = harness.ROOT / "docs"
TINY, LARGE, CARD = "configs/tiny_cpu.yaml", "configs/llama7b_qlora.yaml", "RTX 4090"
SHORT = ("training.max_steps=60", "training.eval_every=15", "output.save_every=20", "output.merge=false")
RUNS = {"rank16": (), "rank4": ("adapter.rank=4", "adapter.alpha=8", "training.learning_rate=1e-3")}
SCHEMES = {1280: "light", 390: "dark"}
# Of a long page, its top and its curves.
HIGHEST = 1600


def main() -> None:
    harness.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="screenshots-") as scratch, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, page in make(Path(scratch)).items():
            for width in SCHEMES if name == "report" else (1280,):
                take(browser, page, width, DOCS / f"{name}_{width}.png")
        browser.close()


def make(folder: Path) -> dict[str, Path]:
    """Train, and write the pages: by name."""
    for name, changes in RUNS.items():
        harness.finetune("train", TINY, *SHORT, *changes, f"output.dir={folder / name}")
    pages = {name: folder / f"{name}.html" for name in ("data", "plan", "compare")}
    harness.finetune("data", TINY, "--html", pages["data"])
    harness.finetune("plan", LARGE, "--gpu", CARD, "--html", pages["plan"])
    harness.finetune("compare", *(folder / name for name in RUNS), "--html", pages["compare"])
    return {"report": folder / next(iter(RUNS)) / "report.html", **pages}


def take(browser: Browser, page: Path, width: int, picture: Path) -> None:
    """Write what a window of this width shows, in few colours: a picture in docs/ should be small."""
    view = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=SCHEMES[width])
    view.goto(page.as_uri())
    view.wait_for_timeout(300)
    height = min(HIGHEST, view.evaluate("document.documentElement.scrollHeight"))
    shot = view.screenshot(clip={"x": 0, "y": 0, "width": width, "height": height}, full_page=True)
    Image.open(BytesIO(shot)).quantize(96).save(picture, optimize=True)
    view.close()


if __name__ == "__main__":
    main()
