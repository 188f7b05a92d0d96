"""anthropic: messages, streams, tools, parsed schemas, its tool runner."""

from anthropic import Anthropic, beta_tool
from features import GREETING, KEY, MODEL, PERSON, QUESTION, SYSTEM, URL, WEATHER, feature, main
from pydantic import BaseModel

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
HELLO = [{"role": "user", "content": GREETING}]
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}
COLD = {"temperature": 0}  # the client has no such argument
called: list[str] = []


class Person(BaseModel):
    name: str
    age: int


@beta_tool
def weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: The city.
    """
    called.append(city)
    return f"Rain in {city}."


@feature("chat")
def chat():
    answer = client.messages.create(model=MODEL, max_tokens=8, system=SYSTEM, messages=HELLO)
    assert answer.content[0].text


@feature("stream")
def stream():
    with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as events:
        assert "".join(events.text_stream) == events.get_final_message().content[0].text != ""


@feature("tools forced")
def tools_forced():
    choice = {"type": "tool", "name": "weather"}
    with client.messages.stream(model=MODEL, max_tokens=64, tools=[TOOL], tool_choice=choice, messages=MESSAGES) as events:
        answer = events.get_final_message()
    assert answer.stop_reason == "tool_use"
    assert answer.content[0].input["city"] in ("Oslo", "Rome")


@feature("tools auto")
def tools_auto():
    answer = client.messages.create(model=MODEL, max_tokens=64, tools=[TOOL], messages=MESSAGES, extra_body=COLD)
    assert answer.stop_reason == "tool_use", answer.content


@feature("structured")
def structured():
    messages = [{"role": "user", "content": PERSON}]
    answer = client.messages.parse(model=MODEL, max_tokens=64, messages=messages, output_format=Person, extra_body=COLD)
    assert answer.parsed_output.name


@feature("messages")
def messages():
    assert client.messages.count_tokens(model=MODEL, messages=HELLO, system=SYSTEM).input_tokens > 10
    assert MODEL in [model.id for model in client.models.list()]


@feature("agent run")
def agent_run():
    runner = client.beta.messages.tool_runner(model=MODEL, max_tokens=100, tools=[weather], messages=MESSAGES, extra_body=COLD)
    answers = list(runner)
    assert called, answers
    assert len(answers) > 1


main("anthropic")
