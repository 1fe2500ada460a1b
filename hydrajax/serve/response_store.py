"""Responses that later requests continue."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from hydrajax.serve.responses_body import ITEMS, ItemReference


class Stored(NamedTuple):
    """A response, and the items of its conversation up to its input, both as JSON."""

    response: bytes
    items: bytes


class ResponseStore:
    """The latest responses in memory, at most ``most`` and ``most_bytes`` of JSON. For one thread."""

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes, self._bytes = most, most_bytes, 0
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._owners: dict[str, str] = {}  # ids of responses by output item

    def put(self, response: dict[str, Any], items: Sequence[Any]) -> None:
        new = Stored(json.dumps(response).encode(), ITEMS.dump_json(list(items), exclude_unset=True, by_alias=True))
        self._kept[response["id"]] = new
        self._bytes += sum(map(len, new))
        self._owners |= {item["id"]: response["id"] for item in response["output"]}
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self.delete(next(iter(self._kept)))

    def get(self, name: str, field: str) -> Stored:
        """Return a response; raise an exception of status 404 that names ``field`` if it is not stored."""
        if name not in self._kept:
            raise HTTPException(404, f"{field}: got '{name}', expected the id of a response that is still stored")
        return self._kept[name]

    def delete(self, name: str) -> None:
        found = self._kept.pop(name)
        self._bytes -= sum(map(len, found))
        for item in json.loads(found.response)["output"]:
            del self._owners[item["id"]]

    def conversation(self, previous: str | None, items: Sequence[Any]) -> list[Any]:
        """Return the items of a request after those of the previous response, without references."""
        found = []
        if previous is not None:
            earlier = self.get(previous, "previous_response_id")
            found = ITEMS.validate_json(earlier.items) + ITEMS.validate_python(json.loads(earlier.response)["output"])
        for number, item in enumerate(items):
            if isinstance(item, ItemReference):
                owner = self.get(self._owners.get(item.id, item.id), f"input.{number}.id")
                (own,) = (one for one in json.loads(owner.response)["output"] if one["id"] == item.id)
                item = ITEMS.validate_python([own])[0]
            found.append(item)
        return found
