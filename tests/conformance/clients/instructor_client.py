"""instructor: its modes of an OpenAI client."""

from collections.abc import Iterable

import instructor
from features import BASE, KEY, MODEL, PERSON, feature, main
from openai import OpenAI
from pydantic import BaseModel

OPTIONS = {"model": MODEL, "temperature": 0, "max_retries": 0}
MESSAGES = [{"role": "user", "content": PERSON}]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def of(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=300), mode=mode)


@feature("chat")
def chat():
    answer = of(instructor.Mode.TOOLS).create(response_model=None, messages=MESSAGES, max_tokens=16, **OPTIONS)
    assert answer.choices[0].message.content


@feature("tools forced")
def tools_forced():
    assert of(instructor.Mode.TOOLS).create(response_model=Person, messages=MESSAGES, max_tokens=64, **OPTIONS).name


@feature("stream")
def stream():
    client = of(instructor.Mode.TOOLS)
    assert list(client.create_partial(response_model=Person, messages=MESSAGES, max_tokens=64, **OPTIONS))[-1].name


@feature("structured")
def structured():
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
        assert of(mode).create(response_model=Person, messages=MESSAGES, max_tokens=64, **OPTIONS).name


@feature("tools auto")
def tools_auto():
    client = of(instructor.Mode.PARALLEL_TOOLS)
    messages = [{"role": "user", "content": f"{PERSON} Call the tool."}]
    assert [person.name for person in client.create(response_model=Iterable[Person], messages=messages, max_tokens=64, **OPTIONS)]


@feature("responses")
def responses():
    client = of(instructor.Mode.RESPONSES_TOOLS)
    assert client.create(response_model=Person, messages=MESSAGES, max_output_tokens=64, **OPTIONS).name


main("instructor", "openai")
