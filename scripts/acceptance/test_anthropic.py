"""The anthropic package against the built-in model."""

import json

import anthropic
import pytest

from common import CAPITAL, PERSON, PERSON_SCHEMA, STORY, TOOLS, WEATHER, serving, until

ANTHROPIC_TOOLS = [
    {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
    for f in (t["function"] for t in TOOLS)
]


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


# The package has no argument for it any more; servers still take it.
GREEDY = {"temperature": 0}


def ask(client, messages, extra=None, **more):
    body = {**GREEDY, **(extra or {})}
    return client.messages.create(model="lapidary", messages=messages, extra_body=body, **{"max_tokens": 300, **more})


def test_message(client):
    reply = ask(client, CAPITAL)
    assert [b.type for b in reply.content] == ["text"]
    assert reply.content[0].text == "The capital of Kenya is Nairobi."
    assert reply.stop_reason == "end_turn"
    assert reply.usage.output_tokens > 0


def test_system(client):
    reply = ask(client, [{"role": "user", "content": "What is your name?"}], system="Your name is Wren. You answer in one sentence.")
    assert reply.content[0].text == "My name is Wren."


def test_thinking(client):
    reply = ask(client, CAPITAL, max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [b.type for b in reply.content] == ["thinking", "text"]
    assert reply.content[0].thinking == "The user asks about Kenya. Its capital is Nairobi."
    # A reply can be handed back as it came.
    more = [*CAPITAL, {"role": "assistant", "content": reply.content}, {"role": "user", "content": "What is the capital of Peru?"}]
    assert ask(client, more).content[0].text == "The capital of Peru is Lima."


def test_stream(client):
    whole = ask(client, STORY)
    with client.messages.stream(model="lapidary", messages=STORY, max_tokens=300, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    with client.messages.stream(
        model="lapidary", messages=CAPITAL, max_tokens=2000, extra_body=GREEDY, thinking={"type": "enabled", "budget_tokens": 1024}
    ) as stream:
        final = stream.get_final_message()
    assert [b.type for b in final.content] == ["thinking", "text"]


def test_tools(client):
    reply = ask(client, WEATHER, tools=ANTHROPIC_TOOLS)
    call = reply.content[-1]
    assert (reply.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Oslo"})
    history = [
        *WEATHER,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "snowy", "temperature": -3}'}]},
    ]
    answer = ask(client, history, tools=ANTHROPIC_TOOLS)
    assert answer.content[0].text == "It is snowy in Oslo and the temperature is -3 degrees."
    with client.messages.stream(model="lapidary", messages=WEATHER, tools=ANTHROPIC_TOOLS, max_tokens=300, extra_body=GREEDY) as stream:
        assert stream.get_final_message().content[-1].input == {"city": "Oslo"}
    forced = ask(client, CAPITAL, tools=ANTHROPIC_TOOLS, tool_choice={"type": "tool", "name": "add"})
    assert forced.content[-1].name == "add"


def test_schema_and_effort(client):
    form = {"type": "json_schema", "schema": PERSON_SCHEMA}
    reply = ask(client, PERSON, output_config={"format": form, "effort": "low"}, thinking={"type": "adaptive"})
    assert json.loads(reply.content[-1].text) == {"name": "Ada", "age": 36, "city": "Lima"}


def test_stop_sequences_and_limits(client):
    whole = ask(client, STORY).content[0].text
    reply = ask(client, STORY, stop_sequences=["Zoe had"])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Zoe had")
    assert reply.content[0].text == whole[: whole.index("Zoe had")]
    assert ask(client, STORY, max_tokens=5).stop_reason == "max_tokens"


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="lapidary", messages=CAPITAL).input_tokens
    usage = ask(client, CAPITAL).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, CAPITAL, {"temperature": -1})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", messages=CAPITAL, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="vision"):
        picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        ask(client, [{"role": "user", "content": [picture]}])


def test_leaving_cancels(server, client):
    with client.messages.stream(
        model="lapidary", messages=STORY, max_tokens=7000, extra_body={**GREEDY, "ignore_eos": True}
    ) as stream:
        next(iter(stream.text_stream))
    until("the slot is free", lambda: server.metrics()["lapidary_requests_running{}"] == 0, 2)
