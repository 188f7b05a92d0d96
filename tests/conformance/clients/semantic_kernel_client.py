"""semantic-kernel: its OpenAI chat service and its agent."""

from features import BASE, GREETING, KEY, MODEL, PERSON, QUESTION, SYSTEM, feature, main
from openai import AsyncOpenAI
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
from semantic_kernel.connectors.ai import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

called: list[str] = []
client = AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=300)
service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)


class Person(BaseModel):
    name: str
    age: int


class Weather:
    @kernel_function(name="weather", description="The weather of a city.")
    def weather(self, city: str) -> str:
        called.append(city)
        return f"Rain in {city}."


KERNEL = Kernel(services=[service])
KERNEL.add_plugin(Weather(), "tools")


def settings(max_tokens: int = 64, **options) -> OpenAIChatPromptExecutionSettings:
    return OpenAIChatPromptExecutionSettings(max_tokens=max_tokens, temperature=0, **options)


def history(text: str) -> ChatHistory:
    chat = ChatHistory(system_message=SYSTEM)
    chat.add_user_message(text)
    return chat


async def with_tool(behaviour: FunctionChoiceBehavior) -> None:
    called.clear()
    answer = await service.get_chat_message_content(
        history(QUESTION), settings(function_choice_behavior=behaviour), kernel=KERNEL
    )
    assert called, str(answer)


@feature("chat")
async def chat():
    assert str(await service.get_chat_message_content(history(GREETING), settings(8)))


@feature("stream")
async def stream():
    chunks = service.get_streaming_chat_message_content(history(GREETING), settings(8))
    assert "".join([str(chunk) async for chunk in chunks])


@feature("tools forced")
async def tools_forced():
    await with_tool(FunctionChoiceBehavior.Required())


@feature("tools auto")
async def tools_auto():
    await with_tool(FunctionChoiceBehavior.Auto())


@feature("structured")
async def structured():
    answer = await service.get_chat_message_content(history(PERSON), settings(response_format=Person))
    assert Person.model_validate_json(str(answer)).name


@feature("responses")
async def responses():
    options = {"ai_model_id": MODEL, "client": client, "instructions": "Be brief.", "name": "helper"}
    assert str(await OpenAIResponsesAgent(**options).get_response(messages=GREETING))
    form = OpenAIResponsesAgent.configure_response_format(Person)
    answer = await OpenAIResponsesAgent(**options, text=form, temperature=0).get_response(messages=PERSON)
    assert Person.model_validate_json(str(answer)).name


@feature("agent run")
async def agent_run():
    called.clear()
    arguments = KernelArguments(settings(100, function_choice_behavior=FunctionChoiceBehavior.Auto()))
    agent = ChatCompletionAgent(name="helper", instructions="Be brief.", kernel=KERNEL, arguments=arguments)
    answer = await agent.get_response(messages=QUESTION)
    assert called, str(answer)


main("semantic-kernel")
