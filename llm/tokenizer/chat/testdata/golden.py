"""Writes what transformers makes of conversations by chat templates.

    pip install transformers jinja2
    python3 golden.py           # golden.json, of the templates below
    python3 golden.py FOLDER    # FOLDER/chat.json, of the templates that fetch.sh gets
"""

import glob
import json
import os
import sys

from transformers.utils import chat_template_utils

CONVERSATIONS = {
    "one": [("user", "Hello, how's it going?")],
    "system": [("system", " You are <b>kind</b>. /think "), ("user", "Hi\n"), ("assistant", "Hello!  "),
               ("user", " 1 < 2 & \"3\" 'x' ")],
    "long": [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "c {{ x }}{% if %}"),
             ("assistant", "d"), ("user", "\u00e9\u4e2d\n\n")],
    "refused": [("assistant", "first"), ("assistant", "again")],
    "empty": [("user", "")],
}

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
}


class Clock:
    @staticmethod
    def now():
        import datetime
        return datetime.datetime(2026, 2, 3, 4, 5, 6)


def render(source):
    out = {}
    for name, turns in CONVERSATIONS.items():
        for prompt in (False, True):
            messages = [{"role": role, "content": content} for role, content in turns]
            try:
                template = chat_template_utils._compile_jinja_template(source)
                text = template.render(messages=messages, add_generation_prompt=prompt,
                                       bos_token="<bos>", eos_token="<eos>")
                out[f"{name}/{prompt}"] = {"text": text}
            except Exception as e:
                out[f"{name}/{prompt}"] = {"error": str(e)[:200]}
    return out


def main():
    chat_template_utils.datetime = Clock
    templates, target = TEMPLATES, os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden.json")
    if len(sys.argv) > 1:
        templates, target = {}, sys.argv[1] + "/chat.json"
        for path in sorted(glob.glob(sys.argv[1] + "/templates/*.jinja")):
            with open(path, encoding="utf-8") as f:
                templates[os.path.basename(path)] = f.read()
        for path in sorted(glob.glob(sys.argv[1] + "/*/tokenizer_config.json")):
            with open(path, encoding="utf-8") as f:
                source = json.load(f).get("chat_template")
            if isinstance(source, str):
                templates[os.path.basename(os.path.dirname(path))] = source
    with open(target, "w", encoding="utf-8") as f:
        json.dump({"conversations": CONVERSATIONS,
                   "templates": {k: {"source": v, "cases": render(v)} for k, v in templates.items()}},
                  f, ensure_ascii=True, indent=1)
        f.write("\n")


main()
