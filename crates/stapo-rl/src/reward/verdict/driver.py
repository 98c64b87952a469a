"""Calls a reward function for `stapo train`. The trainer sends this text to the interpreter as its first line."""

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback

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


def arguments(request):
    row = request["row"]
    if row is None:
        row = {name: request[name] for name in ("id", "prompt", "reference")}
    return request["prompt"], request["response"], request["reference"], row


def call(function, requests, is_batch):
    """The replies to the requests of one call, with what the function printed or raised."""
    printed = io.StringIO()
    error, replies = None, []
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            if is_batch:
                columns = [list(column) for column in zip(*map(arguments, requests))]
                results = list(function(*columns))
                if len(results) != len(requests):
                    raise ValueError(f"returned {len(results)} results for {len(requests)} samples")
            else:
                results = [function(*arguments(requests[0]))]
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


def main():
    file, name, calls = sys.argv[1:]
    requests, replies = open_streams()

    def write(answer):
        replies.write(json.dumps(answer) + "\n")
        replies.flush()

    try:
        function = load(file, name)
    except BaseException:
        write({"error": trace()})
        return
    write({})
    waiting = []
    for line in requests:
        waiting.append(json.loads(line))
        if calls == "batch" and waiting[-1]["n_to_come"] > 0:
            continue
        for answer in call(function, waiting, calls == "batch"):
            write(answer)
        waiting = []


main()
