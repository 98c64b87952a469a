"""Runs the programs of a session, one after another in one namespace, and shows the output of the last."""

import ast
import contextlib
import io
import json
import sys


def run(program, space):
    """Runs a program. The value of a last expression is printed, as an interactive interpreter does."""
    tree = ast.parse(program, "program")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program", "exec"), space)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "program", "eval"), space)
        if value is not None:
            print(repr(value))


def line_of(error):
    """The line of the program at which an error arose."""
    if isinstance(error, SyntaxError):
        return error.lineno
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == "program":
            line = frame.tb_lineno
        frame = frame.tb_next
    return line


def main():
    programs = json.loads(sys.stdin.read())
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    for program in programs[:-1]:
        # An earlier program that raised an error raises it again; what it defined before that stays.
        hidden = io.StringIO()
        with contextlib.suppress(BaseException), contextlib.redirect_stdout(hidden), contextlib.redirect_stderr(hidden):
            run(program, space)
    try:
        run(programs[-1], space)
    except SystemExit:
        raise
    except BaseException as error:
        where = f" in line {line_of(error)}" if line_of(error) else ""
        message = error.msg if isinstance(error, SyntaxError) else str(error)
        print(f"{type(error).__name__}{where}: {message}")
        sys.stdout.flush()
        sys.exit(1)


main()
