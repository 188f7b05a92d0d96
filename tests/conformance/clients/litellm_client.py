"""litellm: chat completions, Responses, and Anthropic's Messages, its bridge to /v1/responses among them."""

import json

import litellm
from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, URL, WEATHER, feature, main
from pydantic import BaseModel

OPENAI = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "timeout": 300, "num_retries": 0}
ANTHROPIC = {**OPENAI, "model": f"anthropic/{MODEL}", "api_base": URL}
HELLO = [{"role": "user", "content": GREETING}]
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}}
litellm.suppress_debug_info = True


class Person(BaseModel):
    name: str
    age: int


def completion(messages: list, max_tokens: int = 64, to: dict = OPENAI, **options):
    return litellm.completion(messages=messages, max_tokens=max_tokens, temperature=0, **to, **options)


@feature("chat")
def chat():
    assert completion(HELLO, 8).choices[0].message.content
    assert litellm.text_completion(prompt="1 2 3", max_tokens=4, **{**OPENAI, "model": f"text-completion-openai/{MODEL}"})


@feature("stream")
def stream():
    assert "".join(chunk.choices[0].delta.content or "" for chunk in completion(HELLO, 8, stream=True))


@feature("tools forced")
def tools_forced():
    choice = {"type": "function", "function": {"name": "weather"}}
    call = completion(MESSAGES, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"]


@feature("tools auto")
def tools_auto():
    answer = completion(MESSAGES, tools=[TOOL])
    assert answer.choices[0].message.tool_calls, answer.choices[0].message.content


@feature("structured")
def structured():
    answer = completion([{"role": "user", "content": PERSON}], response_format=Person)
    assert Person.model_validate_json(answer.choices[0].message.content).name


@feature("responses")
def responses():
    assert litellm.responses(input=GREETING, max_output_tokens=16, **OPENAI).output[0].content[0].text
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    answer = litellm.responses(
        input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=64, temperature=0, **OPENAI
    )
    assert json.loads(answer.output[0].arguments)["city"]


@feature("messages")
async def messages():
    assert completion(HELLO, 8, ANTHROPIC).choices[0].message.content
    assert completion(MESSAGES, 64, ANTHROPIC, tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
    answer = await litellm.anthropic.messages.acreate(messages=HELLO, max_tokens=16, **OPENAI)
    assert answer["content"][0]["text"]
    tool = {"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}
    answer = await litellm.anthropic.messages.acreate(
        messages=MESSAGES, max_tokens=64, tools=[tool], tool_choice={"type": "any"}, temperature=0, **OPENAI
    )
    assert answer["content"][0]["input"]["city"]


main("litellm")
