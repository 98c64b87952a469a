"""Calls a function of the user for `stapo train`: a reward, a tool, or an environment. The trainer sends this text to the interpreter as its first line."""

import contextlib
import importlib.util
import inspect
import io
import json
import os
import sys
import traceback
import types
import typing

MAX_PRINTED = 4000


def open_streams():
    """Requests and replies on descriptors of their own: the function may print, read and start programs."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    return requests, replies


def load(file, function):
    """The function of the file, which may import from the folder of the file, to which the permission is bound."""
    sys.path.insert(0, os.path.dirname(os.path.realpath(file)))
    name = os.path.splitext(os.path.basename(file))[0]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        known = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise AttributeError(f"{file} has no function {function!r}; it has {', '.join(known) or 'none'}")
    return found


def as_reply(result):
    """What the function returned, as the line of a verifier."""
    if isinstance(result, dict):
        unknown = set(result) - {"reward", "verdict", "answer", "reason"}
        if unknown:
            raise TypeError(f"returned a dict with {sorted(unknown)}, expected reward, verdict, answer, reason")
        reply = {key: value for key, value in result.items() if value is not None}
        if "reward" in reply:
            reply["reward"] = float(reply["reward"])
        if isinstance(reply.get("verdict"), bool):
            reply["verdict"] = "right" if reply["verdict"] else "wrong"
        return {key: value if key == "reward" else str(value) for key, value in reply.items()}
    if type(result).__name__ in ("bool", "bool_"):
        return {"verdict": "right" if result else "wrong"}
    if result is None or isinstance(result, (str, bytes)) or not hasattr(result, "__float__"):
        raise TypeError(f"returned {result!r}, expected a number, True, False or a dict")
    return {"reward": float(result)}


def finite(reply):
    """Refuses what JSON cannot hold."""
    if reply.get("reward", 0.0) - reply.get("reward", 0.0) != 0.0:
        raise ValueError(f"returned the reward {reply['reward']}")
    return reply


def trace():
    """The traceback of the current exception, without the frames of this driver."""
    kind, error, frames = sys.exc_info()
    while frames is not None and frames.tb_frame.f_globals is globals():
        frames = frames.tb_next
    return "".join(traceback.format_exception(kind, error, frames)).rstrip()


def row_of(request):
    row = request["row"]
    return row if row is not None else {name: request[name] for name in ("id", "prompt", "reference")}


def arguments(request):
    return request["prompt"], request["response"], request["reference"], row_of(request)


def call_ours(function, requests, is_batch):
    """`reward(prompt, response, reference, row)`, or the same with four lists."""
    if is_batch:
        return function(*[list(column) for column in zip(*map(arguments, requests))])
    return [function(*arguments(request)) for request in requests]


def call_trl(function, requests, is_batch):
    """TRL's `reward(completions, **kwargs)`: lists, with every column of the data as a keyword."""
    rows = [row_of(request) for request in requests]
    columns = {name: [row.get(name) for row in rows] for row in rows for name in row}
    is_chat = isinstance(rows[0].get("prompt"), list)
    columns["prompts"] = [row["prompt"] for row in rows] if is_chat else [request["prompt"] for request in requests]
    texts = [request["response"] for request in requests]
    columns["completions"] = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts
    columns.pop("prompt", None)
    parameters = inspect.signature(function).parameters.values()
    if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
        columns = {name: columns[name] for name in columns if name in [parameter.name for parameter in parameters]}
    # A function returns None for a sample that it does not judge, which adds nothing to the reward.
    return [0.0 if result is None else result for result in function(**columns)]


def of_verl(request):
    row = row_of(request)
    rule = row.get("reward_model")
    reference = rule.get("ground_truth") if isinstance(rule, dict) else None
    reference = request["reference"] if reference is None else reference
    return row.get("data_source"), request["response"], reference, row.get("extra_info")


def from_verl(result):
    """verl's `{"score": ..}` as ours; `acc` is the verdict and `pred` the answer, other keys are left out."""
    if not isinstance(result, dict) or "score" not in result:
        return result
    reply = {"reward": result["score"], "answer": result.get("pred")}
    return reply if result.get("acc") is None else {**reply, "verdict": bool(result["acc"])}


def call_verl(function, requests, is_batch):
    """verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, by keyword as verl calls it."""
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return [from_verl(function(**dict(zip(names, of_verl(request))))) for request in requests]


def call_verl_batch(function, requests, is_batch):
    """The same with lists, as verl's batch reward manager calls it."""
    names = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    columns = [list(column) for column in zip(*map(of_verl, requests))]
    return [from_verl(result) for result in function(**dict(zip(names, columns)))]


def style_of(function):
    """How the function wants to be called, by the names of its parameters."""
    try:
        signature = inspect.signature(function)
    except ValueError:
        return call_ours
    known = {"completions": call_trl, "solution_str": call_verl, "solution_strs": call_verl_batch}
    for name, style in known.items():
        if name in signature.parameters:
            return style
    try:
        signature.bind("", "", "", {})
    except TypeError as error:
        raise TypeError(
            f"{function.__name__}{signature}: expected (prompt, response, reference, row), TRL's (completions, **kwargs) "
            "or verl's (data_source, solution_str, ground_truth, extra_info)"
        ) from error
    return call_ours


def call(function, style, requests, is_batch):
    """The replies to the requests of one call, with what the function printed or raised."""
    printed = io.StringIO()
    error, replies = None, []
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            results = list(style(function, requests, is_batch))
        if len(results) != len(requests):
            raise ValueError(f"returned {len(results)} results for {len(requests)} samples")
        for result in results:
            replies.append(finite(as_reply(result)))
    except BaseException:
        error = trace()
    text = printed.getvalue()
    if len(text) > MAX_PRINTED:
        text = f"{text[:MAX_PRINTED]}\n({len(text) - MAX_PRINTED} characters more)"
    for nth, request in enumerate(requests):
        answer = {"sample": request["sample"], "id": request["id"]}
        if nth < len(replies):
            answer["reply"] = replies[nth]
        else:
            answer["error"] = error
        if nth == 0 or "error" in answer:
            answer["printed"], text = text, ""
        yield answer
        if "error" in answer:
            return


JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}


def type_schema(hint, name):
    """The JSON Schema of a type hint."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is typing.Any:
        return {}
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        options = [type_schema(option, name) for option in inner if option is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    kind = JSON_TYPES.get(origin or hint)
    if kind is None:
        raise TypeError(f"parameter {name!r} has the type {hint!r}, expected str, int, float, bool, list or dict")
    schema = {"type": kind}
    if kind == "array" and inner:
        schema["items"] = type_schema(inner[0], name)
    return schema


def documented(function):
    """The description in a docstring, and those of its arguments in a section `Args:`."""
    text, _, section = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    arguments, last = {}, None
    for line in section.splitlines():
        if line.strip() and not line.startswith(" "):
            break
        name, colon, what = line.strip().partition(":")
        if colon and name.split(" ")[0].isidentifier() and len(line) - len(line.lstrip()) <= 4:
            last = name.split(" ")[0]
            arguments[last] = what.strip()
        elif last and line.strip():
            arguments[last] += " " + line.strip()
    return text.strip(), arguments


def tool_schema(function):
    """What a model is told about a function: its name, its docstring and its parameters with their type hints."""
    hints = typing.get_type_hints(function)
    description, arguments = documented(function)
    if not description:
        raise TypeError(f"{function.__name__} has no docstring, which tells the model what the tool does")
    properties, required = {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"parameter {name!r}: a tool is called with named arguments only")
        if name not in hints:
            raise TypeError(f"parameter {name!r} has no type hint")
        properties[name] = type_schema(hints[name], name)
        if name in arguments:
            properties[name]["description"] = arguments[name]
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"name": function.__name__, "description": description, "parameters": parameters}


def call_tool(function, arguments):
    """The reply of a tool: what it returned as text, or the last line of what it raised."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            result = function(**arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return {"text": text}
    except BaseException as error:
        return {"error": "".join(traceback.format_exception_only(type(error), error)).strip()}


def serve_tool(function, requests, write):
    """Answers calls until there are no more."""
    write({"schema": tool_schema(function)})
    for line in requests:
        request = json.loads(line)
        write({"call": request["call"], **call_tool(function, request["arguments"])})


MAX_EPISODES = 4096
OUTCOME = {"observation", "reward", "done", "verdict", "answer", "reason"}


def as_outcome(result):
    """What a step returned, as a line: an observation, (observation, reward, done), or a dict."""
    if isinstance(result, str):
        return {"observation": result}
    if isinstance(result, tuple) and len(result) == 3:
        result = dict(zip(("observation", "reward", "done"), result))
    if not isinstance(result, dict) or set(result) - OUTCOME:
        raise TypeError(f"step returned {result!r}, expected a text, (observation, reward, done) or a dict of {sorted(OUTCOME)}")
    line = {key: value for key, value in result.items() if value is not None}
    for key, kind in (("reward", float), ("done", bool), ("observation", str), ("answer", str), ("reason", str)):
        if key in line:
            line[key] = kind(line[key])
    if isinstance(line.get("verdict"), bool):
        line["verdict"] = "right" if line["verdict"] else "wrong"
    return finite(line)


def play(kind, episodes, request):
    """Answers the last of the turns. An object that this process does not have is made from the earlier turns."""
    turns = request["turns"]
    environment, n_answered = episodes.pop(request["episode"], (None, None))
    if n_answered != len(turns) - 1:
        environment, n_answered = kind(), 0
        environment.reset(row_of(request))
    for text in turns[n_answered:]:
        line = as_outcome(environment.step(text))
    if not line.get("done"):
        episodes[request["episode"]] = environment, len(turns)
        while len(episodes) > MAX_EPISODES:
            episodes.pop(next(iter(episodes)))
    return line


def serve_environment(kind, requests, write):
    """Answers turns until there are no more."""
    missing = [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]
    if missing:
        raise AttributeError(f"{kind.__name__} has no method {missing[0]!r}; an environment has reset(row) and step(message)")
    write({})
    episodes = {}
    for line in requests:
        request = json.loads(line)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = play(kind, episodes, request)
        except BaseException:
            answer = {"error": trace()}
        write({"episode": request["episode"], **answer})


def main():
    file, name, calls = sys.argv[1:]
    requests, replies = open_streams()

    def write(answer):
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        function = load(file, name)
        if calls == "tool":
            return serve_tool(function, requests, write)
        if calls == "environment":
            return serve_environment(function, requests, write)
        style = style_of(function)
    except BaseException:
        write({"error": trace()})
        return
    write({})
    waiting = []
    for line in requests:
        waiting.append(json.loads(line))
        if calls == "batch" and waiting[-1]["n_to_come"] > 0:
            continue
        for answer in call(function, style, waiting, calls == "batch"):
            write(answer)
        waiting = []


main()
