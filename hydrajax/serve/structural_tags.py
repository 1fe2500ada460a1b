"""Structural tags as a grammar: free text with structured regions between tags, in vLLM's two forms.

The old form has ``structures`` and ``triggers``, the new one xgrammar's ``format``, a tree of formats (Structural Tag
Usage in its documentation). Formats on tokens, ``dispatch``, ``grammar`` and limits of free text are refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hydrajax.errors import HydrajaxError, not_allowed
from hydrajax.grammar.grammar import Grammar
from hydrajax.serve.tool_calls import escaped, json_rule, lark
from hydrajax.text.jsonl import shown

FORMATS: dict[str, dict[str, Any]] = {  # their fields
    "const_string": {"value": str}, "json_schema": {"json_schema": dict}, "regex": {"pattern": str}, "any_text": {},
    "sequence": {"elements": list}, "or": {"elements": list},
    "optional": {"content": dict}, "plus": {"content": dict}, "star": {"content": dict},
    "tag": {"begin": str, "content": dict, "end": (str, list)},
    "triggered_tags": {"triggers": list, "tags": list}, "tags_with_separator": {"tags": list, "separator": str},
}  # fmt: skip
FLAGS = ("at_least_one", "stop_after_first")  # of those with tags
NEUTRAL = {"style": "json", "any_order": False, "excludes": [], "max_tokens": None, "max_chars": None}
TYPES = {str: "a text", list: "a list of at least 1 item", dict: "an object", (str, list): "a text or a list"}
REPEATED = {"optional": "?", "plus": "+", "star": "*"}


def tags_grammar(
    given: Mapping[str, Any], field: str, added: Mapping[str, int], of_schema: Callable[[dict[str, Any], str], Any]
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
        return lark(rules.of(_checked(given, field, {"format": dict})["format"], f"{field}.format", True), rules.lines)
    old, tags = _checked(given, field, {"structures": list, "triggers": list}), []
    for at, one in enumerate(old["structures"]):
        one = _checked(one, f"{field}.structures.{at}", {"begin": str, "schema": dict, "end": str})
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    triggered = {"type": "triggered_tags", "triggers": old["triggers"], "tags": tags}
    return lark(rules.of(triggered, field, True), rules.lines)


class _Rules:
    """The rules of a grammar in llguidance's Lark, collected in ``lines``."""

    def __init__(self, added: Mapping[str, int], of_schema: Callable[[dict[str, Any], str], Any]):
        self._added, self._of_schema = added, of_schema
        self._names = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")
        self.lines = ["ANY: /(.|\\n)*/", "TEXT: /(.|\\n)+/"]

    def of(self, one: Any, field: str, last: bool = False) -> str:
        """Return the expression of a format. ``last``: nothing follows, so that it may be free text."""
        kind = one.get("type") if isinstance(one, Mapping) else None
        if not isinstance(kind, str) or kind not in FORMATS:
            raise not_allowed(f"{field}.type", kind, FORMATS)
        one = _checked(one, field, FORMATS[kind])
        if kind in ("any_text", "triggered_tags") and not last:
            raise HydrajaxError(f"{field}.type: got {kind} before other formats, expected it at the end or in a tag")
        match kind:
            case "const_string":
                return self._literal(one["value"])
            case "json_schema":
                self._of_schema(one["json_schema"], f"{field}.json_schema")
                return json_rule(one["json_schema"])
            case "regex":
                return f"/{escaped(one['pattern'])}/"
            case "any_text":
                return "TEXT?"
            case "sequence" | "or":
                ends = len(one["elements"]) - 1
                found = [
                    self.of(each, f"{field}.elements.{at}", last and (kind == "or" or at == ends))
                    for at, each in enumerate(one["elements"])
                ]
                return f"({(' ' if kind == 'sequence' else ' | ').join(found)})"
            case "tag":
                return self._tag(one, field, one["begin"])
            case "tags_with_separator":
                tag = f"({' | '.join(self._tags(one, field))})"
                more = "" if one["stop_after_first"] else f" ({self._literal(one['separator'])} {tag})*"
                return f"({tag}{more}){'' if one['at_least_one'] else '?'}"
            case "triggered_tags":
                return self._triggered(one, field)
        return f"({self.of(one['content'], f'{field}.content')}){REPEATED[kind]}"

    def _tags(self, one: Mapping[str, Any], field: str) -> list[str]:
        return [self.of(tag, f"{field}.tags.{at}") for at, tag in enumerate(one["tags"])]

    def _tag(self, one: Mapping[str, Any], field: str, begin: str) -> str:
        ends = _texts([one["end"]] if isinstance(one["end"], str) else one["end"], f"{field}.end")
        free = one["content"].get("type") == "any_text"
        content = self.of(one["content"], f"{field}.content", last=free)
        end = " | ".join(map(self._until if free else self._literal, ends))
        return f"{self._literal(begin)} {'' if free else content} ({end})"

    def _triggered(self, one: Mapping[str, Any], field: str) -> str:
        """Return the expression of free text in which a trigger begins a tag."""
        triggers, after = _texts(one["triggers"], f"{field}.triggers"), dict[str, list[str]]()
        for at, tag in enumerate(one["tags"]):
            tag = _checked(tag, f"{field}.tags.{at}", FORMATS["tag"])
            trigger = next((each for each in triggers if tag["begin"].startswith(each)), None)
            if trigger is None:
                raise HydrajaxError(
                    f"{field}.tags.{at}.begin: got {shown(tag['begin'])}, expected it to begin with one of triggers"
                )
            name = self._names.match(trigger)  # this token alone triggers
            trigger = name[0] if name else trigger
            rest = self._tag(tag, f"{field}.tags.{at}", tag["begin"][len(trigger) :])
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
        parts = re.split(f"({self._names.pattern})", text)
        written = (f"<[{self._added[part]}]>" if part in self._added else json.dumps(part) for part in parts if part)
        return " ".join(written) or '""'


def _checked(given: Any, field: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with all of its fields and `FLAGS`; raise `HydrajaxError` for wrong ones."""
    if not isinstance(given, Mapping):
        raise HydrajaxError(f"{field}: got {shown(given)}, expected an object")
    for name, value in given.items():
        flag = name in FLAGS and "tags" in fields and isinstance(value, bool)
        if name not in {"type", *fields} and not flag and NEUTRAL.get(name, given) != value:
            raise HydrajaxError(f"{field}.{name}: this field is not supported")
    for name, kind in fields.items():
        if name not in given:
            raise HydrajaxError(f"{field}.{name}: is missing")
        if not isinstance(given[name], kind) or given[name] == []:
            raise HydrajaxError(f"{field}.{name}: got {shown(given[name])}, expected {TYPES[kind]}")
    return dict.fromkeys(FLAGS, False) | given


def _texts(values: list[Any], field: str) -> list[str]:
    if not all(isinstance(value, str) and value for value in values):
        raise HydrajaxError(f"{field}: got {shown(values)}, expected texts")
    return values
