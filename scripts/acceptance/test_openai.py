"""The openai package against the built-in model."""

import json
import math
import time

import openai
import pytest

from common import CAPITAL, PERSON, PERSON_SCHEMA, STORY, TOOLS, WEATHER, serving, until


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def ask(client, messages, **more):
    return client.chat.completions.create(model="lapidary", messages=messages, **{"temperature": 0, **more})


def test_models(client):
    assert [m.id for m in client.models.list()] == ["lapidary"]
    assert client.models.retrieve("lapidary").id == "lapidary"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    reply = ask(client, CAPITAL)
    assert reply.choices[0].message.content == "The capital of Kenya is Nairobi."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply._request_id.startswith("req-")


def test_stream_equals_whole(client):
    whole = ask(client, STORY)
    chunks = list(ask(client, STORY, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert len({c.id for c in chunks}) == 1


def test_prefix_is_reused_and_told(client):
    long = [{"role": "user", "content": "The secret word is garden. " + "The dog sat by the valley. " * 30 + "What is the secret word?"}]
    cold = ask(client, long)
    warm = ask(client, long)
    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.usage.prompt_tokens_details.cached_tokens > 0


def test_thoughts_are_apart(client):
    for on in [{"reasoning_effort": "high"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}]:
        message = ask(client, CAPITAL, **on).choices[0].message
        assert message.reasoning_content == "The user asks about Kenya. Its capital is Nairobi."
        assert message.content == "The capital of Kenya is Nairobi."
    reply = ask(client, CAPITAL, reasoning_effort="high")
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(ask(client, CAPITAL, reasoning_effort="high", stream=True))
    thought = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)
    assert thought == "The user asks about Kenya. Its capital is Nairobi."
    for off in [{}, {"reasoning_effort": "none"}, {"extra_body": {"enable_thinking": False}}]:
        message = ask(client, CAPITAL, **off).choices[0].message
        assert not hasattr(message, "reasoning_content") and message.content == "The capital of Kenya is Nairobi."


def test_thinking_budget(client):
    reply = ask(client, CAPITAL, extra_body={"thinking_budget": 3})
    assert reply.usage.completion_tokens_details.reasoning_tokens <= 3
    assert reply.choices[0].message.content


def test_tool_round_trip(client):
    reply = ask(client, WEATHER, tools=TOOLS)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    history = [
        *WEATHER,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "snowy", "temperature": -3}'},
    ]
    answer = ask(client, history, tools=TOOLS).choices[0].message.content
    assert answer == "It is snowy in Oslo and the temperature is -3 degrees."


def test_streamed_tool_call(client):
    with client.chat.completions.stream(model="lapidary", messages=WEATHER, tools=TOOLS, temperature=0) as stream:
        for _ in stream:
            pass
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})


def test_tool_choice(client):
    forced = {"type": "function", "function": {"name": "add"}}
    call = ask(client, WEATHER, tools=TOOLS, tool_choice=forced, max_tokens=100).choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add" and set(arguments) >= {"a", "b"}
    required = ask(client, CAPITAL, tools=TOOLS, tool_choice="required", max_tokens=100).choices[0].message.tool_calls
    assert required[0].function.name in ("get_weather", "add")
    assert ask(client, WEATHER, tools=TOOLS, tool_choice="none", max_tokens=30).choices[0].message.tool_calls is None
    one = ask(client, WEATHER, tools=TOOLS, parallel_tool_calls=False).choices[0].message.tool_calls
    assert len(one) == 1


def test_json_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True}}
    person = json.loads(ask(client, PERSON, response_format=form).choices[0].message.content)
    assert person == {"name": "Ada", "age": 36, "city": "Lima"}
    # Hot sampling on a question that has nothing to do with it: the form holds all the same.
    for seed in range(5):
        reply = ask(client, STORY, response_format=form, temperature=2, seed=seed, max_tokens=200)
        person = json.loads(reply.choices[0].message.content)
        assert set(person) == {"name", "age", "city"} and 0 <= person["age"] <= 150
    with_thought = ask(client, PERSON, response_format=form, reasoning_effort="high").choices[0].message
    assert json.loads(with_thought.content)["age"] in range(151)
    free = ask(client, PERSON, response_format={"type": "json_object"}).choices[0].message.content
    assert isinstance(json.loads(free), dict)


def test_bad_schemas_are_refused(client):
    bad = [
        {"properties": {"foo": "bar"}},
        {"type": "string", "pattern": "("},
        {"$ref": "#/nowhere"},
        {"type": "object", "properties": {str(i): {"type": "string", "pattern": f"a{i}" * 50} for i in range(5000)}},
    ]
    for schema in bad:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        start = time.time()
        try:
            ask(client, PERSON, response_format=form, max_tokens=5)
        except openai.BadRequestError:
            pass
        assert time.time() - start < 5, schema
        assert ask(client, CAPITAL).choices[0].message.content


def test_logprobs(client):
    reply = ask(client, CAPITAL, logprobs=True, top_logprobs=20)
    tokens = reply.choices[0].logprobs.content
    assert "".join(t.token for t in tokens) == reply.choices[0].message.content
    for token in tokens:
        assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the likeliest"
        values = [t.logprob for t in token.top_logprobs]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert sum(math.exp(v) for v in values) <= 1 + 1e-4
        assert bytes(token.bytes).decode() == token.token
    chunks = ask(client, CAPITAL, logprobs=True, top_logprobs=20, stream=True)
    streamed = [t for c in chunks if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [(t.token, t.logprob) for t in streamed] == [(t.token, t.logprob) for t in tokens]


def test_seeds_and_choices(client):
    def stories(**more):
        reply = ask(client, STORY, temperature=1, max_tokens=60, **more)
        return [c.message.content for c in reply.choices], reply.usage

    (a,), _ = stories(seed=7)
    (b,), _ = stories(seed=7)
    (c,), _ = stories(seed=8)
    assert a == b != c
    four, usage = stories(seed=7, n=4)
    again, _ = stories(seed=7, n=4)
    assert four == again and four[0] == a and len(set(four)) == 4
    _, single = stories(seed=7)
    assert usage.prompt_tokens == single.prompt_tokens, "the prompt counts once"


def test_stop_strings(client):
    whole = ask(client, STORY).choices[0].message.content
    for stop in ["Zoe gave", ". ", whole[20:23]]:
        choice = ask(client, STORY, stop=[stop, "never to be seen"]).choices[0]
        assert choice.message.content == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = ask(client, STORY, stop=[stop], stream=True)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole[: whole.index(stop)]


def test_limits(client):
    short = ask(client, STORY, max_completion_tokens=5)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 5)


def test_completions(client):
    reply = client.completions.create(model="lapidary", prompt="Once upon a time", max_tokens=12, temperature=0, logprobs=3)
    assert reply.choices[0].text.startswith(" there was a")
    assert len(reply.choices[0].logprobs.tokens) == 12
    chunks = client.completions.create(model="lapidary", prompt="Once upon a time", max_tokens=12, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == reply.choices[0].text
    two = client.completions.create(model="lapidary", prompt=["Once upon a time", "One rainy day"], max_tokens=5, temperature=0, echo=True)
    assert [c.text.startswith(p) for c, p in zip(two.choices, ["Once upon a time", "One rainy day"])] == [True, True]


def test_responses(client):
    reply = client.responses.create(model="lapidary", input="What is the capital of Kenya?", temperature=0, reasoning={"effort": "high"})
    assert reply.output_text == "The capital of Kenya is Nairobi."
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    events = list(client.responses.create(model="lapidary", input="What is the capital of Kenya?", temperature=0, stream=True))
    assert events[-1].type == "response.completed"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "The capital of Kenya is Nairobi."
    flat = [{"type": "function", **t["function"]} for t in TOOLS]
    call = client.responses.create(model="lapidary", input=WEATHER[0]["content"], tools=flat, temperature=0)
    item = call.output[-1]
    assert (item.type, item.name, json.loads(item.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    history = [
        *WEATHER,
        item.model_dump(),
        {"type": "function_call_output", "call_id": item.call_id, "output": '{"weather": "snowy", "temperature": -3}'},
    ]
    answer = client.responses.create(model="lapidary", input=history, tools=flat, temperature=0)
    assert answer.output_text == "It is snowy in Oslo and the temperature is -3 degrees."
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model="lapidary", input="x", previous_response_id="resp_1")


def test_probabilities_of_a_prompt(client):
    # What evaluation harnesses send: the prompt back with its tokens' probabilities, and no answer.
    reply = client.completions.create(
        model="lapidary", prompt="Once upon a time there was", echo=True, logprobs=2, max_tokens=0, temperature=0
    )
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == "Once upon a time there was"
    assert found.token_logprobs[0] is None and all(p <= 0 for p in found.token_logprobs[1:])
    assert "".join(found.tokens[1:]) == reply.choices[0].text and len(found.tokens) == reply.usage.prompt_tokens
    assert [len(top) for top in found.top_logprobs[1:]] == [2] * (len(found.tokens) - 1)
    whole = ask(client, CAPITAL, max_tokens=4, extra_body={"prompt_logprobs": 1})
    assert len(whole.choices[0].prompt_logprobs) == whole.usage.prompt_tokens


def test_logprobs_of_a_response(client):
    reply = client.responses.create(
        model="lapidary", input=CAPITAL, temperature=0, top_logprobs=3, include=["message.output_text.logprobs"]
    )
    part = reply.output[0].content[0]
    assert "".join(p.token for p in part.logprobs) == part.text and len(part.logprobs[0].top_logprobs) == 3


def test_steering_and_captures():
    # A direction as wide as the built-in model's residual stream.
    direction = [math.sin(3 * i) for i in range(256)]
    with serving("--steering-inline") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        plain = ask(client, STORY, max_tokens=20)
        looks = lambda strength: {
            "steering": [{"vector": {"2": direction}, "strength": strength, "layers": "2"}],
            "capture": {"layers": "2", "positions": "last"},
        }
        off = ask(client, STORY, max_tokens=20, extra_body=looks(0)).choices[0]
        on = ask(client, STORY, max_tokens=20, extra_body=looks(3)).choices[0]
        assert off.message.content == plain.choices[0].message.content != on.message.content
        assert off.capture["tensors"]["hidden.2"]["shape"] == [1, 256]
        assert off.capture["tensors"]["hidden.2"]["data"] != on.capture["tensors"]["hidden.2"]["data"]
        # A steered beginning is kept for those that are steered alike, and for no others.
        again = ask(client, STORY, max_tokens=20, extra_body={**looks(3), "capture": None})
        assert again.choices[0].message.content == on.message.content
        assert ask(client, STORY, max_tokens=20).choices[0].message.content == plain.choices[0].message.content
        streamed = [c.choices[0] for c in ask(client, STORY, max_tokens=20, stream=True, extra_body=looks(3))]
        assert [c.capture for c in streamed if hasattr(c, "capture")] == [on.capture]
        with pytest.raises(openai.BadRequestError, match="wide"):
            ask(client, STORY, extra_body={"steering": {"vector": {"2": [1.0]}}})


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, [{"role": "user", "content": "dog " * 20000}])
    assert long.value.code == "context_length_exceeded"
    assert long.value.body["prompt_tokens"] > long.value.body["context_tokens"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=CAPITAL)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, CAPITAL, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="lapidary", input="x")
    for wrong in [{"logit_bias": {"999999": 1}}, {"extra_body": {"stop_token_ids": [-1]}}]:
        with pytest.raises(openai.BadRequestError):
            ask(client, CAPITAL, **wrong)
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    with pytest.raises(openai.BadRequestError, match="vision"):
        ask(client, [{"role": "user", "content": [picture]}])
    raw = client.chat.completions.with_raw_response.create(model="lapidary", messages=CAPITAL, extra_body={"frobnicate": 1})
    assert raw.headers["x-lapidary-ignored"] == "frobnicate"


def test_timeout(client):
    with pytest.raises(openai.APIStatusError) as late:
        ask(client, STORY, max_tokens=5000, extra_body={"timeout": 0.05, "ignore_eos": True})
    assert late.value.status_code == 408


def test_leaving_cancels(server, client):
    stream = ask(client, STORY, stream=True, max_tokens=7000, extra_body={"ignore_eos": True})
    for count, _ in enumerate(stream):
        if count == 3:
            break
    stream.close()
    until("the slot is free", lambda: server.metrics()["lapidary_requests_running{}"] == 0, 2)
    # Without a stream the connection is all that tells.
    with pytest.raises(openai.APITimeoutError):
        ask(client, STORY, max_tokens=7000, extra_body={"ignore_eos": True}, timeout=0.3)
    until("the slot is free", lambda: server.metrics()["lapidary_requests_running{}"] == 0, 2)


def test_keys():
    with serving(env={"LAPIDARY_API_KEY": "secret"}) as server:
        good = openai.OpenAI(base_url=server.url + "/v1", api_key="secret", max_retries=0)
        assert ask(good, CAPITAL).choices
        bad = openai.OpenAI(base_url=server.url + "/v1", api_key="Secret", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            ask(bad, CAPITAL)


def test_strict():
    with serving("--strict") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        assert ask(client, CAPITAL).choices
        with pytest.raises(openai.BadRequestError, match="frobnicate"):
            ask(client, CAPITAL, extra_body={"frobnicate": 1})


def test_a_full_queue_is_429():
    with serving("--parallel", "1", "--queue", "1") as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        streams = []
        with pytest.raises(openai.RateLimitError) as full:
            for _ in range(4):
                streams.append(ask(client, STORY, stream=True, max_tokens=5000, extra_body={"ignore_eos": True}))
        assert int(full.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        busy = ("lapidary_requests_running{}", "lapidary_requests_waiting{}")
        until("there is room", lambda: not any(server.metrics()[name] for name in busy))
        assert ask(client, CAPITAL).choices


def test_stopping_drains():
    with serving() as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = ask(client, STORY, stream=True, max_tokens=300, extra_body={"ignore_eos": True})
        next(iter(stream))
        server.process.terminate()
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(20) == 0
