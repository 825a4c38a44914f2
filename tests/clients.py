"""Clients of others against a server in a process of its own: `make soak-clients`. They come in an environment without
ksana_jax, whose Python runs this file; it needs nothing else of the package.

.venv-clients/bin/python -m tests.clients --server .venv/bin/python    one line for each; 1 if one failed
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MODEL, PROMPT, QUESTION = "ksana-tiny", "Once upon a time", "def main("
MESSAGES = [{"role": "user", "content": QUESTION}]
AGE: dict[str, Any] = {
    "title": "Age",
    "description": "The age of a person.",
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
# Of answers that a grammar ends.
BOUNDED: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NUM_TOKENS = 12
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS}
# lm-evaluation-harness compares the log-likelihoods of choices, and its remote tokenizer never adds BOS.
WITHOUT_BOS = "completion without BOS"
CONTEXT, CHOICES = "Once upon", (" a time", " the hill")
READY_S, CLIENT_S = 300, 180

# No client asks a hub or sends telemetry; none takes a key or a proxy from the machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "OPENAI_API_KEY": "none",
}

# What a client got: "completion", "chat" and the like, each also "streamed ...".
Got = dict[str, Any]


def openai(url: str, folder: Path) -> Got:
    from openai import OpenAI

    with OpenAI(base_url=url, max_retries=0, timeout=CLIENT_S) as client:
        whole = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=3, **GREEDY).choices[0]
        pieces = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **GREEDY)
        got: Got = {
            "completion": whole.text,
            "streamed completion": "".join(chunk.choices[0].text for chunk in pieces),
            "logprobs": whole.logprobs.token_logprobs,
        }
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
        ).choices[0]
        pieces = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **GREEDY)
        got["chat"] = answer.message.content
        got["streamed chat"] = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        got["chat logprobs"] = [token.logprob for token in answer.logprobs.content]
        bare: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"add_special_tokens": False}}
        got[WITHOUT_BOS] = client.completions.create(prompt=PROMPT, max_tokens=NUM_TOKENS, **bare).choices[0].text
        got["log-likelihoods"] = []
        for choice in CHOICES:
            echoed = client.completions.create(prompt=CONTEXT + choice, echo=True, logprobs=1, max_tokens=1, **bare)
            found = echoed.choices[0].logprobs
            scores = zip(found.text_offset[:-1], found.token_logprobs[:-1], strict=True)
            got["log-likelihoods"].append(sum(score for offset, score in scores if offset >= len(CONTEXT)))
        got["embedding"] = client.embeddings.create(model=MODEL, input=PROMPT).data[0].embedding
        got |= openai_structured(client)
    return got


def openai_structured(client: Any) -> Got:
    from openai import pydantic_function_tool

    age, chats, asked = age_model(), client.chat.completions, {"model": MODEL, "messages": MESSAGES}
    tools: dict[str, Any] = {"tools": [pydantic_function_tool(age)], "tool_choice": "required"}
    parsed = chats.parse(**asked, response_format=age, **BOUNDED).choices[0].message.parsed
    message = chats.parse(**asked, **tools, parallel_tool_calls=False, **BOUNDED).choices[0].message
    [call] = message.tool_calls
    with chats.stream(**asked, **tools, parallel_tool_calls=False, **BOUNDED) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "Fine."}]
    with client.responses.stream(
        model=MODEL, input=QUESTION, text_format=age, temperature=0, max_output_tokens=200
    ) as stream:
        response = stream.get_final_response().output_parsed
    return {
        "schema": valid(parsed),
        "call": valid(call.function.parsed_arguments),
        "streamed call": valid(streamed.function.parsed_arguments),
        "after a call": bool(chats.create(**asked | {"messages": history}, **GREEDY).choices[0].message.content),
        "response": valid(response),
    }


def age_model() -> Any:
    from pydantic import BaseModel, ConfigDict, Field

    class Age(BaseModel):
        """The age of a person."""

        model_config = ConfigDict(extra="forbid")
        age: int = Field(ge=0, le=120)

    return Age


def valid(age: Any) -> bool:
    """Whether a client got an age, as a model or a dict."""
    value = age if isinstance(age, dict) else age.model_dump()
    return list(value) == ["age"] and 0 <= value["age"] <= 120


def langchain_openai(url: str, folder: Path) -> Got:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    settings = {"model": MODEL, "base_url": url, "max_retries": 0, "timeout": CLIENT_S, **GREEDY}
    text, chat = OpenAI(**settings), ChatOpenAI(**settings)
    scored = ChatOpenAI(**settings, logprobs=True, top_logprobs=3).invoke(QUESTION)
    counted = OpenAI(**settings, logprobs=3).generate([PROMPT]).generations[0][0].generation_info
    longer = ChatOpenAI(**settings | BOUNDED)
    caller = longer.bind_tools([age_model()], tool_choice="any", parallel_tool_calls=False)
    called, pieces = caller.invoke(QUESTION), list(caller.stream(QUESTION))
    structured = [longer.with_structured_output(age_model(), method=m) for m in ("json_schema", "function_calling")]
    history = [HumanMessage(QUESTION), called, ToolMessage("Fine.", tool_call_id=called.tool_calls[0]["id"])]
    # It counts tokens with OpenAI's tokenizer, from a hub, unless told not to.
    embeds = OpenAIEmbeddings(model=MODEL, base_url=url, check_embedding_ctx_length=False)
    return {
        "embedding": embeds.embed_query(PROMPT),
        "schema": all(valid(model.invoke(QUESTION)) for model in structured),
        "call": valid(called.tool_calls[0]["args"]),
        "streamed call": valid(sum(pieces[1:], pieces[0]).tool_calls[0]["args"]),
        "after a call": bool(chat.invoke(history).content),
        "completion": text.invoke(PROMPT),
        "logprobs": counted["logprobs"]["token_logprobs"],
        "streamed completion": "".join(text.stream(PROMPT)),
        "chat": chat.invoke(QUESTION).content,
        "streamed chat": "".join(chunk.content for chunk in chat.stream(QUESTION)),
        "chat logprobs": [token["logprob"] for token in scored.response_metadata["logprobs"]["content"]],
    }


def litellm(url: str, folder: Path) -> Got:
    from litellm import completion, embedding, text_completion

    text = {"model": f"text-completion-openai/{MODEL}", "prompt": PROMPT}
    chat = {"model": f"hosted_vllm/{MODEL}", "messages": MESSAGES}
    settings = {"api_base": url, "timeout": CLIENT_S, **GREEDY}
    whole = text_completion(**text, logprobs=3, **settings).choices[0]
    scored = completion(**chat, logprobs=True, top_logprobs=3, **settings).choices[0]
    answer = completion(**chat, response_format=age_model(), **settings | BOUNDED).choices[0].message.content
    parameters = {"name": "Age", "parameters": AGE}
    tools = {"tools": [{"type": "function", "function": parameters}], "tool_choice": "required"}
    called = completion(**chat, **tools, parallel_tool_calls=False, **settings | BOUNDED).choices[0].message
    embedded = embedding(model=f"hosted_vllm/{MODEL}", input=[PROMPT], api_base=url, timeout=CLIENT_S)
    return {
        "schema": valid(json.loads(answer)),
        "call": valid(json.loads(called.tool_calls[0].function.arguments)),
        "embedding": embedded.data[0]["embedding"],
        "completion": whole.text,
        "streamed completion": "".join(
            chunk.choices[0].text or "" for chunk in text_completion(**text, stream=True, **settings)
        ),
        "logprobs": whole.logprobs.token_logprobs,
        "chat": scored.message.content,
        "streamed chat": "".join(
            chunk.choices[0].delta.content or "" for chunk in completion(**chat, stream=True, **settings)
        ),
        "chat logprobs": [token["logprob"] for token in scored.logprobs["content"]],
    }


def llm(url: str, folder: Path) -> Got:
    models = [{"model_id": "chat", "supports_schema": True}, {"model_id": "text", "completion": True}]
    home = {"LLM_USER_PATH": str(folder)}
    # JSON is YAML.
    (folder / "extra-openai-models.yaml").write_text(
        json.dumps([{**model, "model_name": MODEL, "api_base": url} for model in models])
    )

    def ask(model: str, prompt: str, *options: str) -> str:
        settings = [word for name, value in GREEDY.items() for word in ("-o", name, str(value))]
        # It prints a line feed after the answer.
        return run("llm", "prompt", "-m", model, *settings, *options, prompt, **home).removesuffix("\n")

    got: Got = {
        "completion": ask("text", PROMPT, "--no-stream"),
        "chat": ask("chat", QUESTION, "--no-stream"),
        "streamed chat": ask("chat", QUESTION),
        "streamed completion": ask("text", PROMPT, "-o", "logprobs", "3"),
    }
    schema = run("llm", "prompt", "-m", "chat", "--schema", json.dumps(AGE), "-o", "temperature", "0", QUESTION, **home)
    got["schema"] = valid(json.loads(schema))
    ask("text", PROMPT, "-o", "logprobs", "3")
    [logged] = json.loads(run("llm", "logs", "list", "--json", "--count", "1", **home))
    tops = [top for piece in logged["response_json"]["logprobs"] for top in piece["top_logprobs"]]
    return {**got, "streamed logprobs": [max(top.values()) for top in tops]}


def lm_eval(url: str, folder: Path) -> Got:
    (folder / "one.json").write_text(json.dumps([{"text": PROMPT, "context": CONTEXT, "choices": CHOICES}]))
    data = {"data_files": {"test": str(folder / "one.json")}}
    common = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "target_delimiter": ""}
    generate: dict[str, Any] = {"output_type": "generate_until", "doc_to_text": "text", "doc_to_target": ""}
    generate["generation_kwargs"] = {"until": [], "temperature": 0, "max_gen_toks": NUM_TOKENS}
    generate["metric_list"] = [{"metric": "exact_match"}]
    choose: dict[str, Any] = {"output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices"}
    choose |= {"doc_to_target": 0, "metric_list": [{"metric": "acc"}]}
    for name, task in {"generate": generate, "choose": choose}.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    run(
        "lm_eval",
        *("run", "--model", "local-completions", "--include_path", str(folder), "--tasks", "generate,choose"),
        *("--model_args", f"model={MODEL},base_url={url}/completions,tokenizer_backend=remote,max_length=256"),
        *("--output_path", str(folder / "out"), "--log_samples"),
        HF_HOME=str(folder / "hub"),
    )

    def responses(task: str) -> list[Any]:
        [file] = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        return [answer[0] for answer in json.loads(file.read_text())["resps"]]

    choices = [float(score) for score, is_greedy in responses("choose")]
    return {WITHOUT_BOS: responses("generate")[0], "log-likelihoods": choices}


def pydantic_ai(url: str, folder: Path) -> Got:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
    from pydantic_ai.providers.openai import OpenAIProvider

    settings = OpenAIChatModelSettings(**GREEDY, timeout=CLIENT_S, openai_logprobs=True, openai_top_logprobs=3)
    agent = Agent(OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url)), model_settings=settings)

    async def ask() -> Got:
        whole = await agent.run(QUESTION)
        async with agent.run_stream(QUESTION) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        scores = whole.response.provider_details["logprobs"]
        outputs = []
        for output in (ToolOutput(age_model()), NativeOutput(age_model())):
            other = Agent(agent.model, output_type=output, model_settings=OpenAIChatModelSettings(**BOUNDED))
            outputs.append((await other.run(QUESTION)).output)
        return {
            "call": valid(outputs[0]),
            "schema": valid(outputs[1]),
            "chat": whole.output,
            "streamed chat": "".join(pieces),
            "chat logprobs": [token["logprob"] for token in scores],
        }

    return asyncio.run(ask())


def instructor(url: str, folder: Path) -> Got:
    """Runs in an environment of its own, `instructor` within the clients': it allows no new version of openai."""
    python = Path(sys.prefix) / "instructor" / "bin" / "python"
    if python.exists():
        return json.loads(run("instructor/bin/python", "-m", "tests.clients", "--alone", "instructor", "--url", url))
    from instructor import Mode, from_openai
    from openai import OpenAI

    got: Got = {"version": importlib.metadata.version("instructor")}
    for name, mode in (("call", Mode.TOOLS), ("schema", Mode.JSON_SCHEMA)):
        with OpenAI(base_url=url, max_retries=0, timeout=CLIENT_S) as client:
            asked = {"model": MODEL, "messages": MESSAGES, "response_model": age_model(), "max_retries": 0}
            got[name] = valid(from_openai(client, mode=mode).chat.completions.create(**asked, **BOUNDED))
    return got


# By the name of their packages, the one first with which the others are compared.
CLIENTS: dict[str, Callable[[str, Path], Got]] = {
    "openai": openai,
    "langchain-openai": langchain_openai,
    "litellm": litellm,
    "llm": llm,
    "lm-eval": lm_eval,
    "pydantic-ai-slim": pydantic_ai,
    "instructor": instructor,
}
REFERENCE = next(iter(CLIENTS))


def run(command: str, *words: str, **environment: str) -> str:
    """Returns what a command of the clients' environment prints.

    Raises:
      RuntimeError: it failed; with the end of what it wrote.
    """
    path = Path(sys.prefix) / (command if "/" in command else f"bin/{command}")
    done = subprocess.run(
        [path, *words], env=os.environ | environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=CLIENT_S
    )
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr.decode().strip()[-300:]}")
    return done.stdout.decode()


def differences(got: Got, expected: Got) -> Iterator[str]:
    for name, value in got.items():
        wanted = expected.get(name.removeprefix("streamed "))
        if value != wanted or not value:
            yield f"{name} is {value!r}, that of {REFERENCE} is {wanted!r}"


@contextlib.contextmanager
def serving(python: str, log: Path) -> Iterator[str]:
    """Yields the URL of a server that another Python runs, once it is ready.

    Raises:
      RuntimeError: it ended, or was not ready within READY_S seconds; with the end of what it wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "ksana_jax", "serve", MODEL, "--port", str(port), "--chat-template", TEMPLATE]
    with log.open("wb") as file:
        server = subprocess.Popen([python, *words], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + READY_S
        while not answers(f"http://127.0.0.1:{port}/ready"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not become ready: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("--server", metavar="PYTHON", help="runs ksana_jax")
    parser.add_argument("--alone", metavar="CLIENT", help="print as JSON what one client gets from the server at --url")
    parser.add_argument("--url")
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if given.alone:
        print(json.dumps(CLIENTS[given.alone](given.url, Path())))
        return
    expected: Got = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder, serving(given.server, log := Path(folder) / "server.log") as url:
        for name, ask in CLIENTS.items():
            own = Path(folder) / name
            own.mkdir()
            label, got = name, {}
            try:
                got = ask(url, own)
                label = f"{name} {got.pop('version', '') or importlib.metadata.version(name)}"
                if name == REFERENCE:
                    expected = got
                reason = "; ".join(differences(got, expected))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            failed += bool(reason)
            print(f"{label}: {reason or 'ok: ' + ', '.join(got)}", flush=True)
        if failed:
            print(f"== the server's last lines\n{log.read_text()[-2000:]}", flush=True)
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
