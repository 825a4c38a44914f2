"""`ksana generate` and `ksana chat`: where prompts come from, and what a conversation sends to the model."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ksana_jax import LLM, AttentionPattern, SamplingParams, cli
from ksana_jax.cli.options import TextOptions
from ksana_jax.core.sources import model_path
from ksana_jax.runner.runner import Runner

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}# {{ m.content }}\n"
    "{% else %}{{ m.role[0] }}: {{ m.content }}\n{% endif %}{% endfor %}a:"
)
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--max-model-len", "128")


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The embedded model with a chat template."""
    folder = tmp_path_factory.mktemp("models") / "talker"
    shutil.copytree(model_path("ksana-tiny"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def prompts():
    return []


@pytest.fixture
def ksana(monkeypatch, run_ksana, prompts):
    """Runs a command with standard input; returns (exit code, output, errors). Prompts that reach an LLM are noted."""
    stream = LLM.stream

    def noted(self, prompt, params=None, **how):
        prompts.append(prompt if isinstance(prompt, str) else prompt["prompt"])
        return stream(self, prompt, params, **how)

    def run(*args, stdin="", terminal=False):
        text = io.StringIO(stdin)
        text.isatty = lambda: terminal
        monkeypatch.setattr("sys.stdin", text)
        prompts.clear()
        return run_ksana(*args)

    monkeypatch.setattr(LLM, "stream", noted)
    return run


@pytest.mark.parametrize("dash", [("-p", "-"), ()])
def test_a_prompt_comes_from_standard_input_without_its_last_newline(ksana, prompts, dash):
    code, out, _ = ksana("generate", "ksana-tiny", *dash, *GREEDY, stdin="def main(\n\n")
    assert code == 0 and prompts == ["def main(\n"] and out.strip()


def test_a_prompt_on_the_command_line_leaves_standard_input_alone(ksana, prompts):
    code, _, _ = ksana("generate", "ksana-tiny", "-p", "def main(", *GREEDY, stdin="something else")
    assert code == 0 and prompts == ["def main("]


@pytest.mark.parametrize(
    ("terminal", "message"), [(True, "give --prompt TEXT, or pipe a text"), (False, "standard input is empty")]
)
def test_no_prompt_is_an_error_before_anything_is_loaded(ksana, terminal, message):
    code, out, error = ksana("generate", "no-such-model", terminal=terminal)
    assert (code, out) == (2, "") and message in error


def test_chat_sends_the_whole_conversation_through_the_template(ksana, prompts, talker):
    code, out, error = ksana("chat", talker, "--system", "Be short.", *GREEDY, stdin="x = 1\n\ny = 2\n")
    assert (code, error) == (0, "")
    first, second = prompts
    assert first == "<s># Be short.\nu: x = 1\na:"
    [answer] = LLM(str(talker), max_model_len=128).chat(
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "x = 1"}],
        SamplingParams(temperature=0, max_tokens=8),
    )
    said = answer.outputs[0].text
    assert said and out.startswith(said + "\n")
    assert second == f"<s># Be short.\nu: x = 1\na: {said}\nu: y = 2\na:"


def test_chat_forgets_and_ends_when_told(ksana, prompts, talker):
    code, _, error = ksana("chat", talker, *GREEDY, stdin="one\n/reset\n/help\n/usr/bin\n/exit\nnever read\n")
    assert code == 0 and "/reset clears" in error
    assert prompts == ["<s>u: one\na:", "<s>u: /usr/bin\na:"]


def test_a_message_that_does_not_fit_is_dropped_and_the_conversation_goes_on(ksana, prompts, talker):
    code, _, error = ksana("chat", talker, *GREEDY, stdin=f"{'x ' * 400}\nshort\n")
    assert code == 0 and "max_model_len is 128" in error
    assert prompts[-1] == "<s>u: short\na:"


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(ksana, prompts, talker, monkeypatch):
    execute, steps = Runner.submit, []

    def interrupted(self, *step):
        steps.append(step)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(self, *step)

    monkeypatch.setattr(Runner, "submit", interrupted)
    code, out, error = ksana("chat", talker, *GREEDY, stdin="one\ntwo\n")
    assert code == 0 and "answer stopped" in error
    # Without the message that was stopped.
    assert prompts == ["<s>u: one\na:", "<s>u: two\na:"]
    [answer] = LLM(str(talker), max_model_len=128).chat(
        [{"role": "user", "content": "two"}], SamplingParams(temperature=0, max_tokens=8)
    )
    assert out.endswith(answer.outputs[0].text + "\n")


def test_ctrl_c_while_text_is_generated_ends_the_command_with_status_130():
    arguments = ["generate", "ksana-tiny", "-p", "def f(x):", "--max-tokens", "400", "--seed", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ksana_jax", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.endswith("ksana: interrupted\n") and "Traceback" not in errors


def test_chat_with_a_model_without_a_template_says_so(ksana):
    code, out, error = ksana("chat", "ksana-tiny", stdin="hello\n")
    assert (code, out) == (2, "") and "ksana-tiny has no chat template" in error
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    code, out, error = ksana("chat", "ksana-tiny", *GREEDY, "--chat-template", template, stdin="hello\n")
    assert code == 0 and out.strip() and not error


def as_input(data: bytes) -> io.TextIOWrapper:
    # As Python opens standard input in the locale C.
    return io.TextIOWrapper(io.BytesIO(data), "utf-8", errors="surrogateescape")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_input_in_another_encoding_is_an_error_that_says_so(monkeypatch, run_ksana, talker, command):
    monkeypatch.setattr(TextOptions, "make_llm", lambda self, model, **settings: None)
    monkeypatch.setattr("sys.stdin", as_input("café".encode("latin-1")))
    code, _, error = run_ksana(command, talker)
    said = "ksana: error: standard input is not utf-8: it has byte 0xe9; convert it, or name its encoding in"
    assert code == 2 and error.startswith(said)


def test_characters_that_the_output_lacks_are_written_as_their_codes(monkeypatch):
    answer = SimpleNamespace(outputs=[SimpleNamespace(text="é 日 🚀 a")], check=lambda: None)
    llm = SimpleNamespace(stream=lambda *given, **how: [answer])
    monkeypatch.setattr(TextOptions, "make_llm", lambda self, model, **settings: llm)
    monkeypatch.setattr("sys.stdout", out := io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["generate", "ksana-tiny", "-p", "x"])
    out.flush()
    assert out.buffer.getvalue() == rb"\xe9 \u65e5 \U0001f680 a" + b"\n"


def test_a_broken_template_is_named_by_chat_and_generate_works(ksana, talker, tmp_path):
    folder = shutil.copytree(talker, tmp_path / "broken")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    code, out, error = ksana("chat", str(folder), stdin="hello\n")
    assert (code, out) == (2, "") and "chat_template.jinja is not UTF-8" in error and "ksana generate" in error
    code, out, error = ksana("generate", str(folder), "-p", "a b", *GREEDY)
    assert code == 0 and out


def test_sinks_belong_to_a_window(ksana, monkeypatch):
    assert "--num-sinks 3 needs --window" in ksana("generate", "ksana-tiny", "-p", "x", "--num-sinks", 3)[2]
    asked = []
    monkeypatch.setattr("ksana_jax.LLM", lambda model, pattern, **_: asked.append(pattern), raising=False)
    monkeypatch.setattr("ksana_jax.cli.text.print_stream", lambda *_: "")
    code, _, _ = ksana("generate", "ksana-tiny", "-p", "x", "--window", 64, "--num-sinks", 3, *GREEDY)
    assert code == 0 and asked == [AttentionPattern(window=64, num_sinks=3)]
