"""OpenAI's agents library: a tool, a typed output and a stream on the Responses API."""

import asyncio
import dataclasses
import os
import sys
from typing import Literal

sys.path.pop(0) if sys.path[0].endswith("programs") else None  # this file has the library's name
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402


class Number(BaseModel):
    number: int = Field(ge=0, le=99)  # an answer that is cut off would be an error of the client


@function_tool
def bricks_in(wall: Literal["north", "south"]) -> int:
    """Count the bricks in a wall."""
    return len(wall)


async def main() -> None:
    set_tracing_disabled(True)
    settings = ModelSettings(max_tokens=60, temperature=0)
    own = {"name": "mason", "model": os.environ["MODEL"]}
    forced = dataclasses.replace(settings, tool_choice="required", parallel_tool_calls=False)
    caller = Agent(tools=[bricks_in], tool_use_behavior="stop_on_first_tool", model_settings=forced, **own)
    found = await Runner.run(caller, "How many bricks are in the north wall?")
    print("tool:", [item.type for item in found.new_items], found.final_output)
    typed = Agent(output_type=Number, model_settings=settings, **own)
    whole = await Runner.run(typed, "How many bricks are in a small wall?")
    streamed = Runner.run_streamed(typed, "How many bricks are in a small wall?")
    events = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == whole.final_output
    print("typed output and stream:", whole.final_output, len(events), "events")


asyncio.run(main())
