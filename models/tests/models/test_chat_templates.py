"""Chat templates: what Transformers makes of them, refusals, and the life of the process in which they run."""

import copy
import gc
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from language_folders import TEMPLATE, save_language_model
from processes import PYTHON, start
from refusals import refusals

import selfattn_models as models
from selfattn_models import _chat

PROCESS = _chat.TemplateProcess()  # of all tests that do not end theirs


def render(template, messages="hi", process=PROCESS, **more):
    return _chat.rendered(template, messages, {"bos_token": "<s>"}, process=process, more=more)


def test_templates_as_models_have_them():
    """What Transformers' environment has: its filters, functions and white space."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), bos_token="<s>"
    )
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "é <b>", "name": "x"}]
    for template in (
        TEMPLATE,
        "{{ bos_token }}\n  {% for m in messages %}\n    {{ loop.index0 ~ '/' ~ loop.length }}"
        "{{ m | tojson }}\n  {% endfor %}\n",
        "{% set ns = namespace(found=false) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.found = m.content %}"
        "{% break %}{% endif %}{% endfor %}{{ ns.found | trim | upper }}",
        "{% macro say(m) -%}{{ m['role'] | title }}: {{ m.content | trim }}{%- endmacro %}"
        "{{ messages | map(attribute='role') | join(',') }}"
        "{{ say(messages[0]) }}{% set x %}in {{ messages | length * 2 }}{% endset %}{{ x }}"
        "{{ messages[1:] | tojson(indent=2) }}",
        "{% set x = 1 %}{% for m in messages %}{%- generation -%} {{ m.content }}{% set x = 2 %}\n"
        "{% endgeneration %}\n{% endfor %}{{ x }}",
        "{% set x = dict(a=1, **dict.fromkeys('bc')) %}{{ x | tojson }}{{ namespace(self=x).self.a }}",
        "{% for m in [messages] recursive %}{{ loop.depth }}{{ m.content or loop(m) }}{% endfor %}",
        "{{ messages[-1].get('name', 'none') }}{{ 'b' in messages[1].content }}{% if tools is not none %}"
        "tools{% endif %}"
        "{{ messages[0].content.strip().split('a') }}{{ 7 // 2 + 7 % 2 }}{% for k, v in messages[0].items() %}"
        "{{ k }}{% endfor %}",
    ):
        expected = theirs.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert render(template, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content %}"
        "{% for part in m.content if part.type == 'text' %}[{{ part['text'] | trim }}]{% endfor %}{% endif %}"
        "{% endfor %}",
        "{% for m in messages %}{{ m.role }}: {% if m.content %}{{ m.content[0]['text'] }}{% endif %}"
        "{{ m.tool_calls | default('none') }}|{% endfor %}",
    ],
)
def test_parts_and_calls_are_those_of_transformers(template):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    expected = utils.render_jinja_template([messages], chat_template=template, add_generation_prompt=True)[0][
        0
    ]
    assert render(template, messages) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{{ messages[0].content | tojson }}",
        "{{ messages[0].content.strip() }}",
        "{{ messages[0].content + '' }}",
    ],
)
def test_parts_are_lines_where_a_template_takes_texts_alone(template):
    one, many = [
        {"role": "user", "content": given} for given in ("a\nb", ["a", {"type": "input_text", "text": "b"}])
    ]
    assert render(template, [many]) == render(template, [one])


def test_variables_of_templates():
    template = "{{ tools | tojson }}{{ enable_thinking | default(true) }}{{ messages[0].content }}"
    assert render(template) == "nullTruehi"
    assert render(template, tools=[{"a": 1}], enable_thinking=False) == '[{"a": 1}]Falsehi'


HALF = (
    "{% set n = namespace(a=[1], b=[1]) %}"
    "{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (HALF + "{{ n.a == n.b }}", "takes more than 2 seconds"),  # one call of C, which looks at no signal
        (
            "{{ 1" + "+ 1" * 20_000 + " }}",
            "takes more than 2 seconds|calls itself",
        ),  # it is not compiled in time
        ("{{ 'a' * 9999999999 }}", "fills the memory"),
        (HALF + "{{ n.a }}", "fills the memory|takes more than"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself without end"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "calls itself without end"),
        ("{{" + "(" * 60_000, "calls itself without end"),
        ("{% set x = 'a' * 6000000 %}{{ x }}{{ x }}", "makes a text of more than 10000000 characters"),
    ],
)
def test_templates_that_take_all_time_memory_or_stack(template, reason):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"^the chat template ({reason})[^\n]*$"):
        render(template)
    assert time.monotonic() - begin < 10  # two seconds, and a start on a busy machine
    assert render("{{ bos_token }}") == "<s>"


def test_a_chat_of_many_messages():
    """Long chats are no attack; half a character is as it was, and for the tokenizer to refuse."""
    messages = [{"role": "user", "content": f"{n} 😀\n\ud800" * 300} for n in range(1000)]
    template = "{% for m in messages %}{{ m.content }}{% if m == (messages | last) %}.{% endif %}{% endfor %}"
    assert render(template, messages) == "".join(each["content"] for each in messages) + "."


NESTED = []
for _ in range(100_000):
    NESTED = [NESTED]
test_templates_and_messages_that_are_refused = refusals(
    (lambda: render("{{ ''.__class__.__mro__ }}"), ValueError, "SecurityError"),
    (lambda: render("{{ messages.append(1) }}"), ValueError, "SecurityError"),
    (
        lambda: render("{{ raise_exception('users first') }}"),
        ValueError,
        "refuses these messages: users first",
    ),
    (
        lambda: render("{{ raise_exception('a\n' * 999) }}"),
        ValueError,
        "^the chat template refuses[^\n]{,500}$",
    ),
    (lambda: render("{{ namespace(_a=1) }}"), ValueError, "SecurityError: the name '_a'"),
    (
        lambda: render("{% set n = namespace() %}{% set n._a = 1 %}"),
        ValueError,
        "SecurityError: the name '_a'",
    ),
    (lambda: render("{{ dict.mro() }}"), ValueError, "UndefinedError"),
    (lambda: render(TEMPLATE, [{"role": "user", "content": "", "x": {1}}]), TypeError, "JSON has no set"),
    (lambda: render(TEMPLATE, [{"role": "user", "content": "", "x": NESTED}]), ValueError, "too deeply"),
    (lambda: render(TEMPLATE, "a" * 32_000_000), ValueError, "bytes; 32000000 are too many"),
    (lambda: render("{% if messages %}{% break %}{% endif %}"), ValueError, "SyntaxError"),
    (lambda: render("{% for %}"), ValueError, "TemplateSyntaxError"),
    (lambda: render("{{ foo.bar }}"), ValueError, "UndefinedError"),
    (lambda: render("{{ 1 / 0 }}"), ValueError, "ZeroDivisionError"),
    (lambda: render("{{ 'a' + 1 }}"), ValueError, "TypeError"),
    (lambda: render("{% include 'x' %}"), ValueError, "TypeError"),
    (lambda: render("{{ 'abcdef' | truncate(1) }}"), ValueError, "AssertionError"),
    (lambda: render(TEMPLATE, []), ValueError, "must not be empty"),
    (lambda: render(TEMPLATE, 3), TypeError, "messages must be a str or a list of dicts, not int"),
    (lambda: render(TEMPLATE, {"role": "user"}), TypeError, "messages must be"),
    (lambda: render(TEMPLATE, ["hi"]), TypeError, "message 0 must be a dict"),
    (lambda: render(TEMPLATE, [{"role": "user"}]), ValueError, "message 0 has no content"),
    (
        lambda: render(TEMPLATE, messages="x", add_generation_prompt=False),
        ValueError,
        "'add_generation_prompt', which",
    ),
    (
        lambda: _chat.rendered(TEMPLATE, "x", {}, more=[1]),
        TypeError,
        "must be a dict of the template's variables",
    ),
    (lambda: render(TEMPLATE, [{"content": "x"}]), TypeError, "message 0 must be a dict"),
)


def running(pid):
    """Tell whether a process runs; one that has ended, and for which its parent has not waited, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid):
    """Tell whether a process ends soon."""
    until = time.monotonic() + 30
    while running(pid) and time.monotonic() < until:
        time.sleep(0.01)
    return not running(pid)


linux = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@linux
def test_the_process_lives_with_the_model_and_copies_have_their_own(tmp_path):
    model = models.load(save_language_model(tmp_path))
    first = model._templates._process.pid  # it starts beside loading
    model.chat_prompt("hi")
    assert "Max address space         536870912" in Path(f"/proc/{first}/limits").read_text()
    again = copy.deepcopy(model)
    assert again.chat_prompt("hi") == model.chat_prompt("hi")
    second = again._templates._process.pid
    assert (model._templates._process.pid, running(first), running(second)) == (first, True, True)
    del model
    gc.collect()
    assert not Path(f"/proc/{first}").exists() and running(second)


def test_a_process_that_is_killed_is_an_error_once(monkeypatch):
    process, exchange = _chat.TemplateProcess(), _chat._exchange

    def kill(running, request):
        running.kill()
        return exchange(running, request)

    with (
        monkeypatch.context() as patch,
        pytest.raises(ValueError, match=r"^the chat template ended its process$"),
    ):
        patch.setattr(_chat, "_exchange", kill)
        render(HALF + "{{ n.a == n.b }}", process=process)
    assert render("a", process=process) == "a"
    process._process.kill()
    process._process.wait()
    assert render("b", process=process) == "b"


def test_ctrl_c_ends_a_rendering():
    process = _chat.TemplateProcess()
    process.start()
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        render(HALF + "{{ n.a == n.b }}", process=process)
    assert render("a", process=process) == "a"
    assert os.getsid(process._process.pid) != os.getsid(0)  # the terminal's Ctrl-C does not reach it


def test_threads_get_their_own_texts():
    with ThreadPoolExecutor(8) as threads:
        texts = [f"{n}" * 1000 for n in range(100)]
        assert list(threads.map(lambda text: render("{{ messages[0].content }}", text), texts)) == texts


FORKS = """
import os, signal, sys, time
from selfattn_models import _chat
process = _chat.TemplateProcess()
render = lambda text: _chat.rendered("{{ messages[0].content }}", text, {}, process=process)
assert render("a") == "a"
pid = process._process.pid
if os.fork() == 0:
    assert render("b") == "b" and process._process.pid != pid
    sys.exit()
assert os.wait()[1] == 0 and render("c") == "c" and process._process.pid == pid
if os.fork() == 0:
    time.sleep(60)
    sys.exit()
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_forks_have_processes_of_their_own_and_keep_none_alive():
    """The program is killed, and the second fork still runs, when the process must end."""
    program = start([*PYTHON, "-W", "error", "-c", FORKS], text=True)
    pid = program.stdout.readline()
    assert pid, program.communicate()[1]
    assert program.wait(30) == -signal.SIGKILL
    assert ends(int(pid))
    program.stdout.close()
    program.stderr.close()


def test_without_jinja2_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match="this needs jinja2, which is not installed: pip install 'jinja2'"):
        render("a", process=_chat.TemplateProcess())


def test_a_program_without_python_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", None)
    model = models.load(save_language_model(tmp_path))
    with pytest.raises(OSError, match="names no Python"):
        model.chat_prompt("hi")
