"""A program for the environment of `make conformance`: runs an agent of openai-agents. Prints what came as JSON.

python agents_run.py URL MODEL
"""

import asyncio
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

called: list[str] = []


@function_tool
def weather(place: str) -> str:
    """Return the weather of a place."""
    called.append(place)
    return f"rain in {place}"


async def main(url: str, model: str) -> dict[str, Any]:
    """Run an agent that calls a tool: its turns given back whole, continued by an id, and streamed."""
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    settings = ModelSettings(tool_choice="required", temperature=0, max_tokens=100)
    agent = Agent(
        name="a", instructions="be brief", tools=[weather], model=OpenAIResponsesModel(model, client), model_settings=settings
    )
    whole = await Runner.run(agent, "hello")
    by_id = await Runner.run(agent, "hello", auto_previous_response_id=True)
    streamed = Runner.run_streamed(agent, "hello")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    texts = [str(result.final_output) for result in (whole, by_id, streamed)]
    return {"called": called, "texts": texts, "ends": [kind for kind in kinds if kind == "response.completed"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(*sys.argv[1:3]))))
