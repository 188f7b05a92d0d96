"""openai: chat, completions, tools, parsed schemas, Responses. test_openai_client.py has its errors, retries and time-outs."""

import json

from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, WEATHER, feature, main
from openai import OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=300)
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}}


class Person(BaseModel):
    name: str
    age: int


@feature("chat")
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": GREETING}], max_tokens=8)
    assert answer.choices[0].message.content
    assert client.completions.create(model=MODEL, prompt="1 2 3", max_tokens=4).choices[0].text


@feature("stream")
def stream():
    with client.chat.completions.stream(model=MODEL, messages=[{"role": "user", "content": GREETING}], max_tokens=8) as events:
        kinds = [event.type for event in events]
    assert "content.delta" in kinds


@feature("tools forced")
def tools_forced():
    choice = {"type": "function", "function": {"name": "weather"}}
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=64, temperature=0
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Oslo", "Rome")


@feature("tools auto")
def tools_auto():
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=64, temperature=0)
    assert answer.choices[0].finish_reason == "tool_calls", answer.choices[0].message.content


@feature("structured")
def structured():
    messages = [{"role": "user", "content": PERSON}]
    answer = client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person, max_tokens=64, temperature=0)
    assert answer.choices[0].message.parsed.name


@feature("responses")
def responses():
    assert client.responses.create(model=MODEL, input=GREETING, max_output_tokens=16).output_text
    answer = client.responses.parse(model=MODEL, input=PERSON, text_format=Person, max_output_tokens=64, temperature=0)
    assert answer.output_parsed.name
    tool = {"type": "function", "name": "weather", "description": None, "parameters": WEATHER, "strict": True}
    called = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=64,
        temperature=0,
    )
    call = called.output[0]
    assert json.loads(call.arguments)["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    with client.responses.stream(
        model=MODEL, input=[result], previous_response_id=called.id, tool_choice="none", max_output_tokens=400, temperature=0
    ) as events:
        assert "response.completed" in [event.type for event in events]


main("openai")
