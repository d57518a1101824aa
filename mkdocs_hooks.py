"""Hooks of mkdocs: README and notebooks are pages, and links to what the site does not hold lead to the repository."""

import json
import os
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent
NOTEBOOKS = ROOT / "examples"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")  # relative links and pictures


def on_files(files, config):
    """Adds the README as index.md, each notebook as a page of its name, and the demo as the folder demo."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        files.append(File.generated(config, f"{notebook.stem}.md", content=notebook_markdown(notebook)))
    if not (demo := ROOT / "build/demo").is_dir():
        raise PluginError("build/demo is missing: run make docs, or make build/demo")
    for path in filter(Path.is_file, demo.rglob("*")):
        name = path.relative_to(demo.parent).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.INCLUDED))
    return files


def notebook_markdown(path):
    """The cells of a notebook with their outputs, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join(data["image/png"].split())
                parts.append(f"![Output of the code above](data:image/png;base64,{picture})")
            else:
                parts.append(f"```text\n{''.join(output.get('text', data.get('text/plain', ''))).rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown, page, config, files):
    """Rewrites links that work in the repository so that they work on the site.

    A link to a page or picture of the site stays, written from docs/. One to another file or folder of the repository
    leads to config.repo_url, or is text if there is none. One to nothing stays, and mkdocs reports it.
    """
    docs = Path(config.docs_dir)
    here = (docs / page.file.src_uri).parent
    written_in = {"index.md": ROOT} | {f"{notebook.stem}.md": NOTEBOOKS for notebook in NOTEBOOKS.glob("*.ipynb")}
    folder = written_in.get(page.file.src_uri, here)

    def rewrite(link):
        picture, text, target, anchor = link.groups(default="")
        path = Path(os.path.normpath(folder / target))
        shown = docs / f"{path.stem}.md" if path.suffix == ".ipynb" else path
        file = files.get_file_from_path(os.path.relpath(shown, docs))
        if file and file.inclusion.is_included():
            return f"{picture}[{text}]({Path(os.path.relpath(shown, here)).as_posix()}{anchor})"
        if picture or not path.exists():
            return link[0]
        source = path.relative_to(ROOT).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{source})" if config.repo_url else text

    return LINK.sub(rewrite, markdown)
