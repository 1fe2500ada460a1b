"""An extension of griffe: lists of arguments and fields in our docstrings, ``name: text``, become Markdown lists."""

import re

import griffe

FIELD = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*):\s+(?=\S)")


def with_lists(text: str) -> str:
    """Lines ``name: ...``, and the indented lines that go on, as items; names in single backticks stay code."""
    lines, in_item = [], False
    for line in text.splitlines():
        match = FIELD.match(line)
        if match:
            if not in_item and lines and lines[-1].strip():
                lines.append("")
            names = ", ".join(f"**`{name}`**" for name in match[1].split(", "))
            lines.append(f"- {names}: {line[match.end() :]}")
            in_item = True
        elif in_item and line.startswith(" ") and line.strip():
            lines.append(f"  {line.strip()}")
        else:
            # A line that is not indented goes on with the sentence of the item, as in "field: ... and the\nnext line".
            lines.append(f"  {line}" if in_item and line.strip() else line)
            in_item = in_item and bool(line.strip())
    return "\n".join(lines)


class FieldLists(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)
