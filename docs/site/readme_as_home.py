"""A hook of mkdocs that shows the README as the home page."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def on_page_markdown(markdown, page, config, files):
    """Return the README for the home page. Links into docs/ stay links; links to other files become plain text."""
    if page.file.src_path != "index.md":
        return markdown
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    own = {file.src_path for file in files}

    def keep_or_name(match):
        target = match[2].partition("#")[0]
        return match[0] if target in own or ":" in target else f"{match[1]} (`{match[2]}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)]+)\)", keep_or_name, text)
