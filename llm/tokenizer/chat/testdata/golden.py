"""Writes the texts that transformers renders for conversations with chat templates.

    pip install transformers jinja2
    python3 golden.py           # golden.json, for the templates below
    python3 golden.py FOLDER    # FOLDER/chat.json, for all templates in FOLDER, which fetch.sh fills

The templates of a folder are the files *.jinja, the chat templates of files tokenizer_config.json, and
the string literals in Python and C++ that look like chat templates.
"""

import ast
import datetime
import glob
import json
import os
import re
import signal
import sys
import warnings

from transformers.utils import chat_template_utils

warnings.simplefilter("ignore")


# Conversations.

TOOLS=[{"type":"function","function":{"name":"get_weather","description":"Get the weather\nfor a <city> & \"place\" é","parameters":{"type":"object","properties":{"city":{"type":"string","description":"The city"},"unit":{"type":"string","enum":["celsius","fahrenheit"]},"days":{"type":["integer","null"],"default":3,"minimum":1.5},"nested":{"type":"object","properties":{"b":{"type":"array","items":{"type":"string"}},"a":{"type":"boolean","default":True}},"required":["b"]}},"required":["city"]},"return":{"type":"number","description":"degrees"}}},
{"type":"function","function":{"name":"now","description":"","parameters":{"type":"object","properties":{}}}}]
DOCS=[{"title":"A","text":"first doc"},{"title":"Bé","text":"second\n doc","doc_id":2}]
def call(name,args,id=None,**kw):
    c={"type":"function","function":{"name":name,"arguments":args}}
    if id: c["id"]=id
    c.update(kw); return c
C={}
def add(name,msgs,**kw): C[name]=(msgs,kw)
U=lambda c,**k:dict(role="user",content=c,**k)
A=lambda c,**k:dict(role="assistant",content=c,**k)
S=lambda c,**k:dict(role="system",content=c,**k)
add("one",[U("Hello, how's it going?")])
add("system",[S(" You are <b>kind</b>. /think "),U("Hi\n"),A("Hello!  "),U(" 1 < 2 & \"3\" 'x' ")])
add("long",[U("a"),A("<think>\nhm\n</think>\n\nb"),U("c {{ x }}{% if %}"),A("d"),U("\u00e9\u4e2d\n\n")])
add("refused",[A("first"),A("again")])
add("empty",[U("")])
add("none",[])
add("emptysystem",[S(""),U("x"),A("")])
add("unicode",[S("Ünï\u2028cödé \u2029"),U("😀 é\u0301 a\u00a0b \x1c \u3000end\u2003"),A("ẞß İi \U0001F468\u200d\U0001F469\u200d\U0001F467"),U("\tΣΑΣ\t")])
add("tools",[S("sys"),U("weather?")],tools=TOOLS)
add("toolcall",[U("weather?"),dict(role="assistant",content="",tool_calls=[call("get_weather",{"city":"Par\u2028is","unit":"celsius","days":2,"f":1.0,"g":1e22,"b":True,"n":None,"l":[1,"x",{}],"z":{"y":1,"a":2}},"call12345")]),dict(role="tool",name="get_weather",tool_call_id="call12345",content="22.0"),A("It is 22."),U("thx")],tools=TOOLS)
add("toolcallnull",[U("weather?"),dict(role="assistant",content=None,tool_calls=[call("now",{},"abcdefghi"),call("get_weather",{"unit":"x","city":"y"},"ABCDEFGHI")]),dict(role="tool",name="now",tool_call_id="abcdefghi",content='{"t": 12}'),dict(role="tool",name="get_weather",tool_call_id="ABCDEFGHI",content='{"a": [1]}')],tools=TOOLS)
add("toolcallstr",[U("w"),dict(role="assistant",content="calling",tool_calls=[call("get_weather",'{"city": "x", "n": 1}',"call12345")]),dict(role="tool",content="ok")],tools=TOOLS)
add("toolnoid",[S("s"),U("w"),dict(role="assistant",tool_calls=[call("now",{})]),dict(role="tool",content={"t":1.5,"é":["ü"]},name="now"),U("more")],tools=TOOLS[:1])
add("listcontent",[S([{"type":"text","text":"sys"}]),U([{"type":"text","text":"what "},{"type":"image"},{"type":"text","text":"is it?"}]),A([{"type":"text","text":"a cat"}]),U([{"type":"image","image":"x"},{"type":"text","text":" "}])])
add("docs",[U("q")],documents=DOCS)
add("docstools",[S("s"),U("q")],documents=DOCS,tools=TOOLS)
add("reasoning",[U("q"),A("answer",reasoning_content="let me\nthink"),U("r"),A("x",thinking="t2"),U("s"),A("y",reasoning="t3\n")])
add("reasoningtool",[U("q"),dict(role="assistant",content="",reasoning_content=" need tool",tool_calls=[call("now",{"k":"v"},"call00001")]),dict(role="tool",content="5",tool_call_id="call00001")],tools=TOOLS,enable_thinking=True)
add("nothink",[S("x"),U("q")],enable_thinking=False,thinking=False)
add("think",[U("q /no_think"),A("<think>a</think>b"),U("z")],enable_thinking=True,thinking=True,reasoning_effort="high")
add("kwargs",[U("q")],date_string="1 Jan 2026",builtin_tools=["brave_search","python"],tools_in_user_message=False,tools=TOOLS,strftime="x",xml_tools=["<a>"],python_tools=["f(x)"],model_identity="I am")
add("kwargs2",[S("ENV"),U("q")],tools=None,custom_tools=TOOLS,keep_past_thinking=True,preserve_thinking=True,clear_thinking=False,documents=[],tool_choice="none",safety_mode="strict",citation_mode="fast",add_vision_id=True)
add("developer",[dict(role="developer",content="dev"),U("q"),A("r")])
add("unknownrole",[dict(role="narrator",content="once"),U("q")])
add("extra",[U("q",name="bob",weight=1,items=[1]),A("r",prefix=True,name="al",train=False,metadata="m")])
add("number",[U(5),A(2.5)])
add("bool",[U(True),A(False)])
add("nonecontent",[U(None),A("x"),U(None)])
add("longtext",[S("word "*3000),U(("line é\n"*2000)),A("x"*20000),U("end")])
add("manyturns",[x for i in range(20) for x in (U(f"question {i}"),A(f"answer {i}\n"))]+[U("last")])
add("toolresults",[U("a"),dict(role="assistant",content="",tool_calls=[call("now",{},"aaaaaaaaa")]),dict(role="tool",content=[{"type":"text","text":"r1"}],tool_call_id="aaaaaaaaa",name="now"),A("b"),U("c"),dict(role="assistant",tool_calls=[call("now",{"x":[[],{}]},"bbbbbbbbb")]),dict(role="tool",content="r2",tool_call_id="bbbbbbbbb",name="now"),A("done")],tools=TOOLS)
add("ipython",[U("a"),A("<|python_tag|>x=1"),dict(role="ipython",content="out"),dict(role="ipython",content={"output":"y"}),U("b")])
add("flatcall",[U("a"),dict(role="assistant",tool_calls=[{"name":"now","arguments":{"b":1,"a":2},"id":"call_1"}]),dict(role="tool",content=3,tool_call_id="call_1")],tools=[TOOLS[1]["function"],TOOLS[0]["function"]])

# The conversations of golden.json.
SMALL = ["one", "system", "long", "refused", "empty", "none", "unicode", "tools", "toolcall", "toolcallnull", "listcontent", "docs",
         "reasoning", "number"]

TEMPLATES = {
    "turns": """{%- if messages[0]['role'] == 'system' %}
    {{- '<|begin|>system\\n' + messages[0].content + '<|end|>\\n' }}
{%- else %}
    {{- '<|begin|>system\\nBe kind.<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|begin|>assistant\\n' }}
{%- endif %}
""",
    "headers": "{% set turns = messages %}{% for m in turns %}{% set content = '<|head|>' + m['role'] + '<|/head|>\n\n'+ "
               "m['content'] | trim + '<|end|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
               "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant' }}{% endif %}",
    "alternating": """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '

' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = "" -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("roles must alternate: " + message['role']) }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<turn>' + role + '
' + (prefix if loop.first else "") + ("" if message.content is string else [1, 2 if a else 3][0]) }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- endif -%}
    {{ '<end>
' }}
{%- endfor -%}
""",
    "thoughts": """{%- set ns = namespace(open=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.open = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- set thought = '' %}
    {%- if '</think>' in message.content %}
        {%- set thought = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- message.role ~ ': ' ~ content.strip() ~ ' [' ~ thought ~ '] ' ~ (loop.index0 > ns.last) ~ '\\n' }}
    {%- if message.reasoning is defined and message.reasoning is not none %}never{% endif %}
{%- endfor %}
{%- if thinking is defined and thinking is false %}{{ 'quiet' }}{% endif %}
""",
    "macros": """{#- a comment with {{ brackets }} -#}
{%- macro turn(role, text, upper=false) -%}
    [{{ role | upper if upper else role }}|{{ text.replace("/think", "") | trim }}]
{%- endmacro -%}
{%- set users = messages | selectattr("role", "equalto", "user") | list -%}
{{ users | length }} of {{ messages | length }}:
{%- for m in messages if m.role != 'system' %}
    {{ turn(m.role, m.content, upper=(true if loop.last else false)) }}
    {%- if loop.last and not loop.first %} end {% elif loop.first %} begin {% endif %}
{% endfor %}
{%- for i in range(1, 3) %}{{ i }}{{ "," if not loop.last }}{% endfor %}
{{ messages | map(attribute='role') | join('-') }} {{ eos_token }} {{ messages[0].content | tojson }}
""",
    "date": "{% if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}Today: {{ day }}\n",
    "fault_spaces": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}{{ eos_token }} {% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
    "fault_comment": "{{ 'a' }} {# note #}b",
    "fault_items": '{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}',
    "fault_rune": '{{ messages[0].content[0] }}',
    "fault_tojson": '{{ messages[0].content | tojson }}',
    "fault_none": "{{ none }}|{{ 'a' ~ none }}|{{ none | default('d') }}|{{ not 0 }}",
    "fault_dictsort": "{% for k, v in {'z': 1, 'y': 2} | items %}{{ k }}{{ v }}{% endfor %}|{{ {'b': 1, 'a': 2} | dictsort }}",
    "fault_numbers": "{{ -7 // 2 }} {{ -7 % 3 }} {{ 2.5 | round }} {{ 'ß' | upper }}",
    "constructs": r'''{{ '-' * 3 }}|{{ [0] * 2 }}|{{ 2 ** 10 }}|{{ '%s: %05.2f%%' % ('x', 3.14159) }}|{{ '%(a)s' % {'a': 1} }}|{{ {'b': [1, {'c': none}], 'a': 'é'} | tojson(indent=2) }}
{%- set a, b = 1, ('x', 'y') %}{{ a }}{{ b }}{% set t = 1, 2 %}{{ t }}|{{ 123456789012345678901234567890 * 10 }}|{{ 9007199254740993 }}|{{ ['a', "it's", '\n'] }}|
{%- for m in messages %}{{ loop.previtem.role if loop.previtem }}<{{ loop.nextitem.role if loop.nextitem is defined }} {% endfor %}
''',
    "generation": r'''{%- for m in messages %}
{%- if m.role == 'assistant' %}
{% generation %}
{{ m.content }}{% set seen = true %}
{% endgeneration %}
{%- else %}
[{{ m.role }}] {{ m.content }}
{%- endif %}
{%- endfor %}
{{ seen is defined }}
''',
    "scopes": r'''{% set x = 1 %}{% macro f(a, b=x) %}{{ a }}{{ b }}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{% set x = 2 %}{% set y = 3 %}{{ f('p', 'q', 'r', k=1) }}
{% for i in range(3) %}{% set x = x + 1 %}{{ x }}{% if i == 1 %}{% continue %}{% endif %}{% else %}none{% endfor %}{{ x }}
{% for i in range(5) if i is odd %}{% if loop.last %}{% break %}{% endif %}{{ i }}{{ loop.length }}{% endfor %}
{% if false %}{% set z = 1 %}{% endif %}{{ z }}{% with a = 1, b = x %}{{ a }}{{ b }}{% endwith %}
{% call(v) f('c') %}{{ v }}{% endcall %}
{{ self.x is defined }}{{ self }}{% macro m() %}{{ self.y }}{% endmacro %}{{ m() }}
''',
    "calls": r'''{% macro wrap(tag) %}<{{ tag }}>{{ caller('in') }}</{{ tag }}>{% endmacro %}{% call(v) wrap('b') %}{{ v }}{% endcall %}
{%- set text %} block {% endset %}[{{ text }}]{% filter upper %}ß{% endfilter %}
{%- raw %} {{ raw }} {% endraw -%}   end
    {#- c -#}
    {% set k = namespace(n=0) %}
    {%+ if true +%}
 kept
    {%- endif %}
{%- for m in messages %}{% set k.n = k.n + m.content | length %}{% endfor %}{{ k.n }}{{ k }}
''',
    "tools": r'''{%- if tools %}{% for t in tools %}{{ t | tojson }}
{{ t.function.parameters.properties.items() | list | length }}{% for name, p in t.function.parameters.properties | dictsort %} {{ name }}:{{ p.type }}{% endfor %}
{% endfor %}{% endif %}{{ tools is defined }}{{ documents is none }}
{%- for m in messages %}
{%- if m.content is string %}{{ m.content }}{% elif m.content is iterable %}{% for c in m.content %}{{ c.text | default('-') }}{% endfor %}{% else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls | default([]) %}{{ c.function.name }}({{ c.function.arguments | tojson(sort_keys=true) }}){{ c.function.arguments }}{% endfor %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}{{ m }}
{% endfor %}''',
    "texts": r'''{% for m in messages %}{% set c = m.content | string %}{{ c | upper }}|{{ c.lower() }}|{{ c | title }}|{{ c.title() }}|{{ c | capitalize }}|{{ c.split() }}|{{ c.splitlines() }}|{{ c[:3] }}|{{ c[::-1] }}|{{ c | tojson }}|{{ [c] }}|{{ c | indent(2) }}|{{ c.strip() ~ c | wordcount }}|{{ c.isalnum() }}|{{ c | first | default('none') }}|{{ c.center(9) }}|{{ c.replace(' ', '_') | urlencode if false else '' }}
{% endfor %}''',
}


class Clock:
    @staticmethod
    def now():
        return datetime.datetime(2026, 2, 3, 4, 5, 6)


class Timeout(BaseException):
    pass


def timeout(*_):
    raise Timeout


def render(source, names):
    out = {}
    for name in names:
        messages, variables = C[name]
        for prompt in (False, True):
            signal.alarm(10)
            try:
                texts, _ = chat_template_utils.render_jinja_template(
                    [chat_template_utils._normalize_chat_messages(messages)], chat_template=source, add_generation_prompt=prompt,
                    bos_token="<bos>", eos_token="<eos>", **variables)
                texts[0].encode()
                case = {"error": "an address in memory"} if " at 0x" in texts[0] else {"text": texts[0]}
            except (Exception, Timeout) as e:
                case = {"error": f"{type(e).__name__}: {e}"[:200]}
            finally:
                signal.alarm(0)
            out[f"{name}/{prompt}"] = case
    return out


def literals(path):
    """Returns the string literals of a file that look like chat templates."""
    with open(path, encoding="utf-8", errors="replace") as f:
        text = f.read()
    if "{%" not in text:
        return
    if path.endswith(".py"):
        try:
            tree = ast.parse(text)
        except SyntaxError:
            return
        found = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    else:
        found = [m.group(2) for m in re.finditer(r'R"(\w*)\((.*?)\)\1"', text, re.S)]
        for m in re.finditer(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', text):
            parts = re.findall(r'"((?:[^"\\\n]|\\.)*)"', m.group())
            found.append("".join(parts).encode("latin-1", "backslashreplace").decode("unicode-escape", "replace"))
    for literal in found:
        if "{%" in literal and "messages" in literal and "%}" in literal:
            yield literal


def collect(folder):
    """Returns all distinct templates of a folder by name."""
    templates, seen = {}, set()

    def put(name, source):
        if isinstance(source, str) and source not in seen and re.search("message|loop", source):
            seen.add(source)
            templates[name] = source

    for path in sorted(glob.glob(folder + "/**/*", recursive=True)):
        name = os.path.relpath(path, folder)
        if path.endswith(".jinja"):
            with open(path, encoding="utf-8", newline="") as f:
                put(name, f.read())
        elif os.path.basename(path) == "tokenizer_config.json":
            with open(path, encoding="utf-8") as f:
                source = json.load(f).get("chat_template")
            for one in source if isinstance(source, list) else [{"name": "", "template": source}]:
                put(name + one["name"], one["template"])
        elif path.endswith((".py", ".cpp")) and os.path.isfile(path):
            for i, literal in enumerate(literals(path)):
                put(f"{name}:{i}", literal)
    return templates


def main():
    chat_template_utils.datetime = Clock
    signal.signal(signal.SIGALRM, timeout)
    templates, target, names = TEMPLATES, os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden.json"), SMALL
    if len(sys.argv) > 1:
        templates, target, names = collect(sys.argv[1]), sys.argv[1] + "/chat.json", list(C)
    with open(target, "w", encoding="utf-8") as f:
        json.dump({"conversations": {n: {"messages": C[n][0], "variables": C[n][1]} for n in names},
                   "templates": [{"name": k, "source": v, "cases": render(v, names)} for k, v in templates.items()]}, f, indent=1)
        f.write("\n")
    print(len(templates), "templates")


if __name__ == "__main__":
    main()
