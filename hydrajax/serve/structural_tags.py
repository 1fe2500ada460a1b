"""Structural tags as a grammar: free text with structured regions between tags, in vLLM's two forms.

The old form has ``structures`` and ``triggers``, the new one xgrammar's ``format``, a tree of formats (Structural Tag
Usage in its documentation). Formats on tokens, ``dispatch``, ``grammar`` and limits of free text are refused.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.grammar.grammar import Grammar
from hydrajax.serve.tool_calls import json_rule, lark
from hydrajax.text.jsonl import shown

Format = Mapping[str, Any]
ONCE = {"at_least_one": (bool, False), "stop_after_first": (bool, False)}
# Fields of each format: type and default; a type of None allows the default only.
FORMATS: dict[str, dict[str, tuple]] = {
    "const_string": {"value": (str,)},
    "json_schema": {"json_schema": (dict,), "style": (None, "json"), "any_order": (None, False)},
    "regex": {"pattern": (str,)},
    "any_text": dict.fromkeys(("max_tokens", "max_chars"), (None, None)) | {"excludes": (None, [])},
    **{kind: {"elements": (list,)} for kind in ("sequence", "or")},
    **{kind: {"content": (dict,)} for kind in ("optional", "plus", "star")},
    "tag": {"begin": (str,), "content": (dict,), "end": ((str, list),)},
    "triggered_tags": {"triggers": (list,), "tags": (list,), "excludes": (None, []), **ONCE},
    "tags_with_separator": {"tags": (list,), "separator": (str,), **ONCE},
}
TYPES = {str: "a text", list: "a list", dict: "an object", bool: "true or false", (str, list): "a text or a list"}
REPEATED = {"optional": "?", "plus": "+", "star": "*"}


def tags_grammar(
    given: Format, field: str, added: Mapping[str, int], of_schema: Callable[[dict[str, Any], str], Any]
) -> Grammar:
    """Return the grammar of a structural tag.

    Args:
        given: either form.
        field: the request's field with it.
        added: ids of the base's added tokens, by which their names in literals are written.
        of_schema: checks a JSON schema of a field.

    Raises:
        HydrajaxError: for a form, format or schema that is not supported.
    """
    rules = _Rules(added, of_schema)
    if "format" in given:
        start = rules.of(_checked(given, field, {"format": (dict,)})["format"], f"{field}.format", last=True)
    else:  # the old form
        structures = _checked(given, field, {"structures": (list,), "triggers": (list,)})["structures"]
        each = {"begin": (str,), "schema": (dict,), "end": (str,)}
        found = [_checked(one, f"{field}.structures.{at}", each) for at, one in enumerate(structures)]
        contents = [{"type": "json_schema", "json_schema": one["schema"]} for one in found]
        tags = [
            {"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]}
            for one, content in zip(found, contents, strict=True)
        ]
        triggered = {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
        start = rules.of(triggered, field, last=True)
    return lark(start, rules.lines)


class _Rules:
    """The rules of a grammar in llguidance's Lark, collected in ``lines``."""

    def __init__(self, added: Mapping[str, int], of_schema: Callable[[dict[str, Any], str], Any]):
        self._added, self._of_schema = added, of_schema
        self._names = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        self.lines = ["ANY: /(.|\\n)*/", "TEXT: /(.|\\n)+/"]

    def of(self, given: Any, field: str, last: bool = False) -> str:
        """Return the expression of a format. ``last``: nothing follows, so that it may be free text."""
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind not in FORMATS:
            raise not_allowed(f"{field}.type", kind, FORMATS)
        one = _checked(given, field, {"type": (str,), **FORMATS[kind]})
        if kind in ("any_text", "triggered_tags") and not last:
            raise HydrajaxError(f"{field}.type: got {kind} before other formats, expected it at the end or in a tag")
        match kind:
            case "const_string":
                return self._literal(one["value"])
            case "json_schema":
                self._of_schema(one["json_schema"], f"{field}.json_schema")
                return json_rule(one["json_schema"])
            case "regex":
                pattern = re.sub(r"\\.|/", lambda found: found[0] if len(found[0]) > 1 else r"\/", one["pattern"])
                return f"/{pattern}/".replace("\n", r"\n")
            case "any_text":
                return "TEXT?"
            case "sequence" | "or":
                count = len(one["elements"])
                found = [
                    self.of(each, f"{field}.elements.{at}", last and (kind == "or" or at == count - 1))
                    for at, each in enumerate(one["elements"])
                ]
                return f"({(' ' if kind == 'sequence' else ' | ').join(found)})" if any(found) else '""'
            case "tag":
                return self._tag(one, field, self._literal(one["begin"]))
            case "tags_with_separator":
                tag = f"({' | '.join(self._tags(one, field))})"
                more = "" if one["stop_after_first"] else f" ({self._literal(one['separator'])} {tag})*"
                return f"({tag}{more}){'' if one['at_least_one'] else '?'}"
            case "triggered_tags":
                return self._triggered(one, field)
        return f"({self.of(one['content'], f'{field}.content')}){REPEATED[kind]}"

    def _tags(self, one: Format, field: str) -> list[str]:
        """Return the expression of each tag in a list."""
        return [self.of(tag, f"{field}.tags.{at}") for at, tag in enumerate(one["tags"])]

    def _tag(self, one: Format, field: str, begin: str) -> str:
        ends = [one["end"]] if isinstance(one["end"], str) else one["end"]
        _each_text(ends, f"{field}.end")
        if one["content"].get("type") != "any_text":
            end = " | ".join(map(self._literal, ends))
            return f"{begin} {self.of(one['content'], f'{field}.content')} ({end})"
        self.of(one["content"], f"{field}.content", last=True)
        return f"{begin} ({' | '.join(map(self._until, ends))})"

    def _triggered(self, one: Format, field: str) -> str:
        """Return the expression of free text in which a trigger begins a tag."""
        _each_text(one["triggers"], f"{field}.triggers")
        after: dict[str, list[str]] = {}
        for at, tag in enumerate(one["tags"]):
            tag = _checked(tag, f"{field}.tags.{at}", {"type": (str,), **FORMATS["tag"]})
            trigger = next((each for each in one["triggers"] if tag["begin"].startswith(each)), None)
            if trigger is None:
                raise HydrajaxError(
                    f"{field}.tags.{at}.begin: got {shown(tag['begin'])}, expected it to begin with one of triggers"
                )
            name = self._names.match(trigger)  # this token alone triggers
            trigger = name[0] if name else trigger
            rest = self._tag(tag, f"{field}.tags.{at}", self._literal(tag["begin"][len(trigger) :]))
            after.setdefault(trigger, []).append(rest)
        called = " | ".join(f"{self._until(trigger)} ({' | '.join(tags)})" for trigger, tags in after.items())
        first = f"({' | '.join(self._tags(one, field))})" if one["at_least_one"] else ""
        if one["stop_after_first"]:
            return first or f"({called} | TEXT?)"
        return f"({first} ({called})* TEXT?)"

    def _until(self, text: str) -> str:
        """Return the expression of free text up to the first occurrence of a text, and the text."""
        if self._names.search(text):
            return f"TEXT? {self._literal(text)}"
        self.lines.append(f"until_{len(self.lines)}[lazy]: ANY {json.dumps(text)}")
        return f"until_{len(self.lines) - 1}"

    def _literal(self, text: str) -> str:
        """Return the expression of a text, with the names of added tokens as tokens."""
        found, at = [], 0
        for name in self._names.finditer(text):
            found += [text[at : name.start()], name]
            at = name.end()
        parts = [*found, text[at:]]
        written = [json.dumps(x) if isinstance(x, str) else f"<[{self._added[x[0]]}]>" for x in parts if x != ""]
        return " ".join(written)


def _checked(given: Any, field: str, fields: Mapping[str, tuple]) -> dict[str, Any]:
    """Return an object with its fields' defaults; raise `HydrajaxError` for wrong ones."""
    if not isinstance(given, Mapping):
        raise HydrajaxError(f"{field}: got {shown(given)}, expected an object")
    for name in given:
        if name not in {"type", *fields}:
            raise HydrajaxError(f"{field}.{name}: this field is not supported")
    found = {}
    for name, (kind, *default) in fields.items():
        if name not in given and not default:
            raise HydrajaxError(f"{field}.{name}: is missing")
        found[name] = value = given.get(name, *default)
        if kind is None and value not in default:
            raise HydrajaxError(f"{field}.{name}: got {shown(value)}, expected {shown(default[0])}")
        if kind is not None and not isinstance(value, kind):
            raise HydrajaxError(f"{field}.{name}: got {shown(value)}, expected {TYPES[kind]}")
        if kind is list and not value:
            raise HydrajaxError(f"{field}.{name}: got an empty list, expected at least 1 item")
    return found


def _each_text(values: Sequence[Any], field: str) -> None:
    if not values or not all(isinstance(value, str) and value for value in values):
        raise HydrajaxError(f"{field}: got {shown(values)}, expected texts")
