"""Writes random templates and their output in transformers, to compare with this package.

    pip install transformers jinja2
    python3 testdata/fuzz.py 20000 1 /tmp/fuzz.json     # number, seed, file
    KASMINA_CHAT_CORPUS=/tmp/fuzz.json go test -run TestPublished -v .

The test fails if a text differs, or if this package renders a template that Jinja2 refuses. It lists the
templates that only this package refuses.
"""

import json
import random
import signal
import sys
import warnings

from transformers.utils import chat_template_utils

warnings.simplefilter("ignore")

MESSAGES = [
    {"role": "system", "content": " Be <b>kind</b> & \"good\".\n"},
    {"role": "user", "content": "Héllo wörld\u2028 ßtraße 😀\tx  ", "name": "bob", "n": 3},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "a1", "function": {"name": "f", "arguments": {"b": 1, "a": [1.5, None, True, "é"]}}}]},
    {"role": "tool", "content": ["x", {"type": "text", "text": "T"}], "items": 7},
    {"role": "User", "content": "end", "n": 10},
]
VARIABLES = {
    "s": "The quick-brown fox (ΣΊΣΥΦΟΣ), don't!\n\n  two\r\nthree\x0bfour ",
    "e": "", "z": 0, "i": 7, "j": -3, "f": 2.5, "g": -0.75, "big": 12345678901234567890, "t": True,
    "no": False, "nil": None, "l": [3, 1, 2], "w": ["b", "A", "c", "a", "B"], "el": [],
    "d": {"b": 1, "a": {"y": [1, 2], "x": None}, "C": "é"}, "ed": {},
    "objs": [{"k": "x", "v": 2}, {"k": "Y", "v": 1}, {"k": "x", "v": 3}, {"v": 0}],
    "digits": " 42 ", "hex": "0x1F", "num": "-3.5e2", "mixed": [1, "1", 1.0, True, None, [1], "a"],
}


class Generator:
    def __init__(self, seed):
        self.r = random.Random(seed)
        self.names = []
        self.depth = 0
        self.nested = 0
        self.simple = False  # emphasize scopes over expressions

    def one(self, *options):
        return self.r.choice(options)

    def maybe(self, p):
        return self.r.random() < p

    def string(self):
        text = self.one("", "a", "b", "x", " ", "é", "ß", "😀", "\\n", "\\t", "abc", "a,b,c", "%s", "%d-%s", "<&>", "Ab cd", "{}",
                        "{0}:{x}", "\\u2028", "\\x41", "\\é", "1", "12", "-", "a\\\\", "don\\'t", "role", "user", " x ", "\\\"q")
        quote = self.one("'", '"')
        if quote == '"' and "\\'" in text:
            quote = "'"
        return quote + text + quote

    def number(self):
        return self.one("0", "1", "2", "3", "-1", "10", "7", "1.5", "0.1", "2.675", "1e3", "1_000", "0x1f", "2.0", "100", "-2.5",
                        "1e16", "1e-5", "123456789012345678901", "255")

    def name(self):
        if self.names and self.maybe(0.4):
            return self.r.choice(self.names)
        return self.one(*VARIABLES, "messages", "undefd", "s", "l", "d", "w", "objs", "i", "f")

    def atom(self):
        k = self.r.random()
        if k < 0.45:
            return self.name()
        if k < 0.6:
            return self.string()
        if k < 0.75:
            return self.number()
        if k < 0.8:
            return self.one("true", "false", "none", "True", "None")
        if k < 0.86:
            return "[" + ", ".join(self.expr() for _ in range(self.r.randrange(4))) + "]"
        if k < 0.9:
            return "(" + self.expr() + ", " + self.expr() + ")"
        if k < 0.94:
            return "{" + ", ".join(f"{self.one(self.string(), self.string(), self.number())}: {self.expr()}"
                                   for _ in range(self.r.randrange(3))) + "}"
        return self.one("messages[%d]" % self.r.randrange(-2, 6), "messages[1].content", "messages[2].tool_calls[0].function.arguments",
                        "range(%d)" % self.r.randrange(5), "range(5, 0, -2)", "namespace(a=1, b='x')", "dict(a=1, b=[2])",
                        "messages[3].content", "d.items()", "d.keys()", "d.values()", "dict([['k', 1]])")

    def expr(self):
        """Returns an expression. At the outermost level, most expressions can be evaluated."""
        if self.simple:
            return self.one("v1", "v2", "v3", "i", "s[:2]", "x", "y", "m.role", "p", "q", "undefd", "1", "'a'", "[1, 2]", "v1 ~ v2", "i ~ x", "mac(v1)",
                            "mac()", "mac(q=i)", "v2 is defined", "namespace(a=v1).a")
        if self.nested:
            if self.nested > 3:
                return self.atom()
            self.nested += 1
            text = self.expression()
            self.nested -= 1
            return text

        for attempt in range(12):
            self.nested = 1
            text = self.expression()
            self.nested = 0
            try:
                render("{{ " + text + " }}")
                return text
            except Exception:
                if self.maybe(0.05):
                    return text
        return self.name()

    def expression(self):
        k = self.r.random()
        if k < 0.22:
            return self.atom()
        if k < 0.40:
            return self.expr() + self.filter()
        if k < 0.52:
            return self.expr() + self.method()
        if k < 0.62:
            op = self.one("+", "-", "*", "/", "//", "%", "~", "~", "+")
            return f"{self.operand()} {op} {self.operand()}"
        if k < 0.64:
            return f"{self.operand()} ** {self.one('2', '3', '0', '-1', '1')}"
        if k < 0.70:
            op = self.one("==", "!=", "<", "<=", ">", ">=", "in", "not in")
            return f"{self.operand()} {op} {self.operand()}"
        if k < 0.74:
            return f"{self.operand()} {self.one('and', 'or')} {self.operand()}"
        if k < 0.76:
            return "not " + self.operand()
        if k < 0.78:
            return self.one("-", "+") + self.operand()
        if k < 0.83:
            return f"({self.expr()} if {self.expr()}" + (f" else {self.expr()})" if self.maybe(0.8) else ")")
        if k < 0.93:
            return self.operand() + self.test()
        return self.operand() + self.subscript()

    def operand(self):
        return self.atom() if self.maybe(0.6) else "(" + self.expr() + ")"

    def subscript(self):
        b = lambda: self.one("", "", "1", "-1", "2", "-2", "0", "10", "none")
        return self.one(f"[{self.number()}]", f"[{b()}:{b()}]", f"[{b()}:{b()}:{self.one('1', '-1', '2', '-2', '')}]", f"[{self.string()}]",
                        ".role", ".content", "['a']", ".a", ".b", ".items", ".x", ".0", ".k", "[0]", "[-1]", "[true]")

    def test(self):
        return " is " + self.one("", "", "not ") + self.one(
            "defined", "undefined", "none", "string", "number", "integer", "float", "mapping", "iterable", "sequence", "boolean", "true",
            "false", "callable", "odd", "even", "lower", "upper", "divisibleby 3", "divisibleby(2)", "in [1, 2, 'a']", "eq 1", "equalto('a')",
            "sameas none", "sameas(true)", "gt 1", "lt(2)", "ge 0", "ne none", "escaped", "filter", "test", "in d", "in s")

    def method(self):
        a = self.string
        return "." + self.one(
            "upper()", "lower()", "strip()", f"strip({a()})", "lstrip()", f"rstrip({a()})", "title()", "capitalize()", "swapcase()",
            f"split({a()})", "split()", f"split({a()}, 1)", f"split(none, 1)", f"rsplit({a()}, 1)", "rsplit(none, 1)", "splitlines()",
            "splitlines(true)", f"startswith({a()})", f"endswith({a()})", f"startswith(({a()}, {a()}))", f"replace({a()}, {a()})",
            f"replace({a()}, {a()}, 1)", f"find({a()})", f"rfind({a()})", f"index({a()})", f"count({a()})", f"find({a()}, 2)",
            f"count({a()}, 1, 5)", f"join({self.expr()})", f"partition({a()})", f"rpartition({a()})", f"removeprefix({a()})",
            f"removesuffix({a()})", "isdigit()", "isalpha()", "isalnum()", "isspace()", "isupper()", "islower()", "istitle()", "isnumeric()",
            "isdecimal()", "isascii()", "isprintable()", f"center({self.one('5', '12', '40')})", f"ljust(10, {a()})", "rjust(9)", "zfill(6)",
            "items()", "keys()", "values()", f"get({self.expr()})", f"get({a()}, {self.expr()})", f"count({self.expr()})", f"index({self.expr()})",
            "copy()", "append(1)", "pop()", "update({})", f"format({self.expr()}, x={self.expr()})", "foo()", "foo", "real", "start", "bit_length")

    def filter(self):
        a, e = self.string, self.expr
        return " | " + self.one(
            "upper", "lower", "trim", f"trim({a()})", "title", "capitalize", "length", "count", "first", "last", "list", "string", "int", "float",
            f"int({e()})", "int(base=16)", f"float({e()})", "abs", "round", "round(1)", "round(2)", "round(0, 'ceil')", "round(1, 'floor')",
            "round(-1)", f"default({e()})", f"default({e()}, true)", f"d({a()})", "join", f"join({a()})", f"join(', ', attribute={self.one(chr(39) + 'k' + chr(39), chr(39) + 'role' + chr(39), '0')})",
            "sort", "sort(reverse=true)", "sort(case_sensitive=true)", "sort(attribute='v')", "sort(attribute='k,v')", "unique", "unique | list",
            "reverse", "reverse | list", "min", "max", "max(attribute='v')", "sum", "sum(attribute='v')", "sum(start=1)", "dictsort",
            "dictsort(reverse=true)", "dictsort(by='value')", "dictsort(true)", "items", "items | list", "tojson", "tojson(indent=2)",
            "tojson(indent=0)", "tojson(ensure_ascii=true)", "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "tojson(indent='-')",
            "tojson(none, 4)", f"replace({a()}, {a()})", f"replace({a()}, {a()}, 1)", "indent", "indent(2)", "indent(3, true)",
            "indent(1, true, true)", f"indent({a()})", "map('upper') | list", "map(attribute='k') | list", "map(attribute='k', default='-') | list",
            "map('int') | sum", "map('string') | join(';')", "map('length') | list", "select | list", "select('string') | list", "reject('none') | list",
            "select('odd') | list", "select('gt', 1) | list", "selectattr('k') | list", "selectattr('k', 'equalto', 'x') | list",
            "selectattr('v', 'gt', 1) | list", "rejectattr('k', 'defined') | list", "selectattr('role', 'in', ['user', 'tool']) | map(attribute='content') | list",
            "batch(2) | list", "batch(2, '-') | list", "slice(2) | list", "slice(3, 0) | list", "groupby('k')", "groupby('k', default='q')",
            "groupby('v') | map('first') | list", "attr('real')", "attr('items')", "center(11)", "wordcount", "truncate(9)", "truncate(8, true, '!')", "pprint" if self.maybe(0.1) else "length", "nofilter" if self.maybe(0.1) else "upper",
            "escape", "e", "safe", "forceescape", f"format({e()})", f"format({e()}, {e()})", "first | default('q')", "list | last")

    # Statements.

    def tag(self, content):
        left = self.one("", "", "", "-", "+")
        right = self.one("", "", "", "-", "+")
        return "{%" + left + self.one(" ", "", "\n") + content + self.one(" ", " ", "\n ") + right + "%}"

    def data(self):
        return self.one("", "", " ", "\n", "\n\n", "  \n  ", "x", " y ", "\n    ", "a\n", "\t", "}}", "é", "\u2028", "\r\n", "{", "%}", "# ", "\x1c")

    def block(self):
        self.depth += 1
        scope = list(self.names)
        body = "".join(self.statement() for _ in range(self.r.randrange(1, 4)))
        self.names = scope
        self.depth -= 1
        return body

    def statement(self):
        k = self.r.random()
        text = self.data()
        if k < 0.35 or self.depth > 3:
            left, right = self.one("", "", "-"), self.one("", "", "-")
            return text + "{{" + left + " " + self.expr() + " " + right + "}}" + self.data()
        if k < 0.5:
            loop = self.one("x", "m", "y")
            iterable = self.one("messages", "l", "w", "objs", "d", "s", "range(3)", "el", "undefd", "l | reverse", "w | select('lower')", self.expr())
            target = loop
            if self.maybe(0.2):
                target, iterable = "k, v", self.one("d.items()", "d | items", "d | dictsort", "[(1, 2), (3, 4)]", "objs")
            condition = self.one("", "", "", f" if {loop if target == loop else 'k'} {self.one('', 'is string', 'is mapping', 'is defined')}")
            scope = list(self.names)
            self.names += [n.strip() for n in target.split(",")] + ["loop.index", "loop.last", "loop.first", "loop.previtem", "loop.nextitem", "loop.length",
                                                                    "loop.revindex0", "loop.cycle('a', 'b')", "loop.changed(loop.first)", "loop"]
            body = self.block()
            if self.maybe(0.15):
                body += self.tag("if " + self.expr()) + self.tag(self.one("break", "continue")) + self.tag("endif") + self.data()
            self.names = scope
            otherwise = self.tag("else") + self.block() if self.maybe(0.2) else ""
            return text + self.tag(f"for {target} in {iterable}{condition}") + body + otherwise + self.tag("endfor")
        if k < 0.62:
            middle = self.tag("elif " + self.expr()) + self.block() if self.maybe(0.3) else ""
            otherwise = self.tag("else") + self.block() if self.maybe(0.5) else ""
            return text + self.tag("if " + self.expr()) + self.block() + middle + otherwise + self.tag("endif")
        if k < 0.78:
            name = self.one("v1", "v2", "v3", "i", "s")
            out = text + self.tag(f"set {name} = {self.expr()}")
            self.names.append(name)
            return out
        if k < 0.81:
            self.names += ["v1", "v2"]
            return text + self.tag(self.one("set v1, v2 = 1, 'x'", f"set v1, v2 = {self.expr()}", "set v1 = (1, 2)", "set v1 = 1,"))
        if k < 0.85:
            self.names += ["ns.a", "ns.b", "ns"]
            return text + self.tag(f"set ns = namespace(a={self.expr()})") + self.tag(f"set ns.{self.one('a', 'b')} = {self.expr()}")
        if k < 0.88:
            self.names.append("v1")
            return text + self.tag("set v1" + self.one("", " | upper", " | trim")) + self.block() + self.tag("endset")
        if k < 0.92:
            scope = list(self.names)
            self.names += ["p", "q"]
            self.depth += 2
            body = self.block() + (("{{ " + self.one("varargs", "kwargs", "caller()") + " }}") if self.maybe(0.15) else "")
            self.depth -= 2
            self.names = scope + ["mac(1)", f"mac({self.expr()}, q={self.string()})", "mac()", "mac(1, 2, 3)", "mac"]
            return text + self.tag(f"macro mac(p, q={self.expr()})") + body + self.tag("endmacro")
        if k < 0.94:
            return self.wrapped(text)
        if k < 0.96:
            left, right = self.one("", "-", "+"), self.one("", "-", "+")
            return text + "{#" + left + self.one(" c ", "", " {{ x }} ", "\n") + right + "#}" + self.data()
        if k < 0.98:
            return text + self.tag("raw") + self.one("{{ x }}", " {% if %} ", "{# a #}", "\n") + self.tag("endraw")
        return text + "{{ " + self.expr() + ", " + self.expr() + " }}"

    def wrapped(self, text):
        begin, end = self.one(("generation", "endgeneration"), ("filter upper", "endfilter"), ("filter trim | replace('a', 'b')", "endfilter"),
                              (f"with v1 = {self.expr()}, v2 = v1", "endwith"), ("call mac(2)", "endcall"))
        return text + self.tag(begin) + self.block() + self.tag(end)

    def template(self):
        self.names = []
        return "".join(self.statement() for _ in range(self.r.randrange(1, 6))) + self.data()


class Timeout(BaseException):
    pass


def timeout(*_):
    raise Timeout


ENVIRONMENT = chat_template_utils._compile_jinja_template("").environment


def render(source):
    """Renders a template within two seconds."""
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        return ENVIRONMENT.from_string(source).render(
            messages=json.loads(json.dumps(MESSAGES)), add_generation_prompt=False, tools=None, documents=None, bos_token="<bos>",
            eos_token="<eos>", **json.loads(json.dumps(VARIABLES)))
    except Timeout:
        raise ValueError("too slow") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main():
    count, seed, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGALRM, timeout)
    generator = Generator(seed)
    templates = []
    for n in range(count):
        generator.simple = n % 3 == 0
        source = "{{ " + generator.expr() + " }}" if n % 3 == 1 else generator.template()
        try:
            text = render(source)
            text.encode()
            case = {"error": "an address in memory"} if " at 0x" in text else {"text": text}
        except Exception as e:
            case = {"error": f"{type(e).__name__}: {e}"[:200]}
        templates.append({"name": str(n), "source": source, "cases": {"fuzz/False": case}})
    with open(target, "w", encoding="utf-8") as f:
        json.dump({"conversations": {"fuzz": {"messages": MESSAGES, "variables": VARIABLES}}, "templates": templates}, f)
    print(sum("text" in t["cases"]["fuzz/False"] for t in templates), "of", count, "rendered")


if __name__ == "__main__":
    main()
