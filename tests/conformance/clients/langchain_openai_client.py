"""langchain-openai: ChatOpenAI over chat completions and over Responses, and an agent of langchain."""

from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, feature, main
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

called: list[str] = []


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    called.append(city)
    return f"Rain in {city}."


def model(max_tokens: int = 64, **options) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=BASE, api_key=KEY, max_retries=0, timeout=300, temperature=0, max_tokens=max_tokens, **options
    )


@feature("chat")
def chat():
    assert model(8).invoke(GREETING).content


@feature("stream")
def stream():
    assert "".join(str(chunk.content) for chunk in model(8).stream(GREETING))


@feature("tools forced")
def tools_forced():
    assert model().bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls[0]["args"]["city"]


@feature("tools auto")
def tools_auto():
    answer = model().bind_tools([weather]).invoke(QUESTION)
    assert answer.tool_calls, answer.content


@feature("structured")
def structured():
    for method in ("json_schema", "function_calling"):
        assert model().with_structured_output(Person, method=method).invoke(PERSON).name


@feature("responses")
def responses():
    assert model(16, use_responses_api=True).invoke(GREETING).content
    assert model(use_responses_api=True).bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls
    assert model(use_responses_api=True).with_structured_output(Person).invoke(PERSON).name
    assert list(model(16, use_responses_api=True).stream(GREETING))


@feature("agent run")
def agent_run():
    answer = create_agent(model(100), [weather]).invoke({"messages": [("user", QUESTION)]})
    assert called, answer["messages"][-1].content
    assert len(answer["messages"]) > 3


main("langchain-openai", "langchain")
