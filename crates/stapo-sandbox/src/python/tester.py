"""The interpreter that runs tests. It never runs anything of a model: what tests take from the program is a `Remote`,
which asks the program's process through the pool and gets plain values back."""
import ast
import builtins
import math

# Modules that tests may name without importing them. They are this interpreter's, whatever the program imported.
MODULES = {
    "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools",
    "json", "math", "operator", "random", "re", "statistics", "string", "sys", "typing",
}  # fmt: skip
# Exceptions that tests may expect. Those that end loops or the interpreter are not passed on: `all(map(f, xs))` is true
# where f raises StopIteration.
EXCEPTIONS = {
    kind.__name__: kind
    for kind in (
        ArithmeticError, AssertionError, AttributeError, Exception, FloatingPointError, IndexError, KeyError, LookupError,
        NameError, NotImplementedError, OSError, OverflowError, RecursionError, RuntimeError, TypeError, UnicodeError,
        ValueError, ZeroDivisionError,
    )
}  # fmt: skip


class ProgramFailed(Exception):
    """An exception of the program that has no counterpart here."""


class Remote:
    """A name or an object of the program. Equal only to itself; calls and attributes are asked for in the program's process."""

    __slots__ = ("_target", "_kind", "_ask")

    def __init__(self, target, kind, ask):
        for name, value in (("_target", target), ("_kind", kind), ("_ask", ask)):
            object.__setattr__(self, name, value)

    def __call__(self, *args, **kwargs):
        return self._ask(self, {"do": "call"}, args, kwargs)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask(self, {"do": "get", "attribute": name})

    def __setattr__(self, name, value):
        self._ask(self, {"do": "set", "attribute": name}, (value,))

    def __eq__(self, other):
        return isinstance(other, Remote) and self._target == other._target

    def __hash__(self):
        return hash(self._target)

    def __bool__(self):
        return bool(self._ask(self, {"do": "bool"}))

    def __repr__(self):
        return f"<{self._kind} of the program>"


class Asking:
    """The way to the program, and what it was last asked, for messages."""

    def __init__(self, channel):
        self.channel = channel
        self.last = ""
        self.raised = None

    def remote(self, number, kind):
        return Remote(number, kind, self.ask)

    def named(self, name):
        return Remote(name, name, self.ask)

    def ask(self, remote, request, args=(), kwargs=None):
        encode = Encoder(self.handle).encode
        request["target"] = remote._target
        request["args"] = [encode(arg) for arg in args]
        request["kwargs"] = {key: encode(value) for key, value in (kwargs or {}).items()}
        self.channel.write({"ask": request})
        reply = self.channel.read()
        if "raised" in reply:
            kind, text = reply["raised"]
            self.last = f"{remote._kind} raised {kind}: {text}"
            self.raised = EXCEPTIONS.get(kind, ProgramFailed)(text)
            raise self.raised
        value = decode(reply["value"], self.remote)
        if request["do"] == "call":
            self.last = f"{remote._kind} returned {shortened(value)}"
        return value

    def handle(self, value):
        if isinstance(value, Remote):
            return [value._target, value._kind]
        raise TypeError(f"the test passes a {type(value).__name__}, which cannot be sent to the program")


def shortened(value):
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > 100:
        return f"a {type(value).__name__} of {len(value)} items"
    try:
        text = repr(value)
    except Exception as error:
        return type(error).__name__
    return text if len(text) <= 200 else text[:200] + " ..."


def names_read(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def bind(space, tree, names, asking, entry_point=None):
    """Gives the tests the modules and the program's names that they read. A name of Python stays Python's, unless the tests
    call nothing else of the program and no function is named: some rows test a function called `sum`."""
    read = names_read(tree)
    called = {
        node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    for name in (read & MODULES) - called - set(space):
        space[name] = __import__(name)
    wanted = {name for name in read if name in names and name not in space}
    taken = {name for name in wanted if not hasattr(builtins, name)}
    for name in taken or (wanted & called if entry_point is None else ()):
        space[name] = asking.named(name)


def tests_of(request, asking):
    """Yields pairs of a test's text and a function that fails where the test does."""
    checks, names = request["checks"], request["names"]
    space = {"__name__": "tests"}
    kind = checks["kind"]
    if kind == "asserts":
        trees = [parsed(text) for text in [checks["setup"], *checks["tests"]]]
        bind(space, ast.Module([node for tree in trees for node in tree.body], []), names, asking)
        setup = compile(checks["setup"], "<setup>", "exec")
        exec(setup, space)
        for text in checks["tests"]:
            yield text, lambda text=text: exec(compile(text, "<tests>", "exec"), space)
    elif kind == "check":
        exec(compile(prelude(checks["prelude"]), "<prelude>", "exec"), space)
        bind(space, parsed(checks["test"]), names, asking, checks["entry_point"])
        space[checks["entry_point"]] = candidate = asking.named(checks["entry_point"])
        exec(compile(checks["test"], "<tests>", "exec"), space)
        yield checks["test"], lambda: space["check"](candidate)
    elif kind == "calls":
        function = asking.named(checks["entry_point"])
        for call in checks["calls"]:
            yield call_text(checks, call), lambda call=call: check_call(function, call, checks)
    else:
        exec(compile(checks["checker"], "<checker>", "exec"), space)
        for given, output, expected in checks["outputs"]:
            yield given, lambda one=(given, output, expected): check_output(space["check"], one)


def parsed(text):
    return ast.parse(text)


def prelude(text):
    """The definitions of a prompt that ends in the head of an unfinished function."""
    for ending in ("", "\n    pass\n", "\n        pass\n"):
        try:
            ast.parse(text + ending)
            return text + ending
        except SyntaxError:
            pass
    return ""


def call_text(checks, call):
    return f"{checks['entry_point']}({', '.join(shortened(arg) for arg in call['args'])}) == {call['expected']}"


def check_call(function, call, checks):
    expected = ast.literal_eval(call["expected"]) if call["is_literal"] else call["expected"]
    value = function(*call["args"])
    assert equal(value, expected, checks, not call["is_literal"])


def check_output(check, one):
    assert check(*one) is True


def equal(value, expected, checks, is_json):
    """Whether a value is the expected one: floats within the tolerance, and tuples as lists where JSON has no tuples."""
    if is_json and checks["unordered"] and isinstance(value, (set, frozenset)):
        value = list(value)
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return value == expected or math.isclose(value, expected, rel_tol=1e-9, abs_tol=checks["atol"])
    sequences = (list, tuple)
    if isinstance(value, sequences) and isinstance(expected, sequences):
        if not is_json and type(value) is not type(expected) or len(value) != len(expected):
            return False
        if checks["unordered"]:
            return equal_unordered(list(value), expected, checks, is_json)
        return all(equal(a, b, checks, is_json) for a, b in zip(value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        if is_json:
            value = {key if isinstance(key, str) else json.dumps(key, default=str): item for key, item in value.items()}
        return value.keys() == expected.keys() and all(
            equal(item, expected[key], checks, is_json) for key, item in value.items()
        )
    return type(value) is type(expected) and value == expected


def equal_unordered(rest, expected, checks, is_json):
    for item in expected:
        found = next((at for at, other in enumerate(rest) if equal(other, item, checks, is_json)), None)
        if found is None:
            return False
        del rest[found]
    return True


def failing_line(error, text):
    """The line of the tests that failed: the deepest one of a longer text, or the text itself."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<tests>"]
    rows = text.split("\n")
    return rows[lines[-1] - 1].strip() if lines and len(rows) > 1 and lines[-1] <= len(rows) else text.strip()


def outcome(text, test, asking):
    asking.last = ""
    try:
        test()
        return {"passed": True, "message": ""}
    except BaseException as error:
        found = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
        if asking.last and (isinstance(error, AssertionError) or error is asking.raised):
            found = asking.last
        return {"passed": False, "message": f"{failing_line(error, text)[:500]}: {found}"}


def run_tests(channel):
    request = channel.read()
    asking = Asking(channel)
    try:
        for text, test in tests_of(request, asking):
            channel.write({"result": outcome(text, test, asking)})
    except BaseException as error:
        channel.write({"broken": f"{type(error).__name__}: {str(error)[:500]}"})
    channel.write("done")
    os._exit(0)
