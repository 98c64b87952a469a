"""Values as JSON, between a program and its tests. Plain JSON stands for None, truth values, small integers and text;
everything else is [tag, ..]. The pool checks the form of what a program sends."""
import collections
import decimal
import fractions
import types

MAX_DEPTH = 50
MAX_ITEMS = 200_000


class Encoder:
    """Turns values into JSON. `handle` gives the number of a value that cannot be copied."""

    def __init__(self, handle):
        self.handle = handle
        self.n_items = 0

    def encode(self, value, depth=0):
        self.n_items += 1
        if self.n_items > MAX_ITEMS or depth > MAX_DEPTH:
            raise ValueError("a value with too many or too deeply nested parts")
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            value = int.__int__(value)
            return value if abs(value) < 1 << 53 else ["i", format(value, "x")]
        if isinstance(value, float):
            return ["f", float.hex(value)]
        if isinstance(value, str):
            value = str.__str__(value)
            try:
                value.encode()
                return value
            except UnicodeEncodeError:
                return ["u", [ord(character) for character in value]]
        for kind, tag in CONTAINERS:
            if isinstance(value, kind):
                return [tag, [self.encode(item, depth + 1) for item in kind.__iter__(value)]]
        if isinstance(value, dict):
            pairs = dict.items(value)
            return ["d", [[self.encode(k, depth + 1), self.encode(v, depth + 1)] for k, v in pairs]]
        return self.encode_rarer(value, depth)

    def encode_rarer(self, value, depth):
        kind = type(value)
        if kind in (bytes, bytearray):
            return ["b", value.hex()]
        if kind is complex:
            return ["c", float.hex(value.real), float.hex(value.imag)]
        if kind is range:
            return ["r", *(self.encode(part) for part in (value.start, value.stop, value.step))]
        if kind is type and value.__name__ in TYPES:
            return ["T", value.__name__]
        if kind is fractions.Fraction:
            return ["F", f"{value.numerator}/{value.denominator}"]
        if kind is decimal.Decimal:
            return ["D", str(value)]
        if kind in VIEWS:
            return [VIEWS[kind], [self.encode(item, depth + 1) for item in value]]
        if kind in ITERATORS:
            items = []
            for item in value:
                items.append(self.encode(item, depth + 1))
            return ["I", items]
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            return self.encode(value.tolist(), depth + 1)
        return ["h", *self.handle(value)]


TYPES = {kind.__name__: kind for kind in (int, float, complex, str, bytes, bool, list, tuple, set, frozenset, dict)}
CONTAINERS = [(list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"), (collections.deque, "q")]
VIEWS = {type({}.keys()): "K", type({}.values()): "V", type({}.items()): "M"}
ITERATORS = {
    types.GeneratorType, map, filter, zip, enumerate, reversed, type(iter([])), type(iter(())), type(iter(set())),
    type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter("")), type(iter(range(0))),
    type(reversed([])),
}  # fmt: skip


def decode(value, from_handle):
    """The value of what an encoder wrote and the pool has checked."""
    if not isinstance(value, list):
        return value
    tag, *parts = value
    if tag == "h":
        return from_handle(*parts)
    if tag in DECODERS:
        return DECODERS[tag](*parts)
    items = [decode(item, from_handle) for item in parts[0]] if tag != "d" else []
    if tag == "d":
        return {decode(k, from_handle): decode(v, from_handle) for k, v in parts[0]}
    return COLLECTED[tag](items)


DECODERS = {
    "i": lambda digits: int(digits, 16),
    "f": float.fromhex,
    "u": lambda points: "".join(map(chr, points)),
    "b": bytes.fromhex,
    "c": lambda real, imag: complex(float.fromhex(real), float.fromhex(imag)),
    "r": lambda *parts: range(*(decode(part, None) for part in parts)),
    "T": TYPES.get,
    "F": fractions.Fraction,
    "D": decimal.Decimal,
}
COLLECTED = {
    "l": list,
    "t": tuple,
    "s": set,
    "z": frozenset,
    "q": collections.deque,
    "I": iter,
    "K": lambda items: dict.fromkeys(items).keys(),
    "V": lambda items: dict(enumerate(items)).values(),
    "M": lambda items: dict(items).items(),
}
