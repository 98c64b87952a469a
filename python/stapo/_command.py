"""The program `stapo` inside Python.

The program starts itself again for the runs of an experiment and for verifiers, some of which get an almost empty
environment. It then runs this file as a script, which finds the extension module next to it and imports nothing else: a
search path does not matter, and no imported library starts threads before the program isolates a verifier.
"""

import importlib.machinery
import importlib.util
import os
import signal
import sys


def main(arguments: "list[str] | None" = None) -> int:
    """Runs the command that the arguments name, by default those of this process, and returns its exit status.

    Output goes to the standard streams of the process. Ctrl-C ends the process, or lets a training step finish, as it
    does for the executable; so in a notebook start `python -m stapo` as a separate process.

    >>> import stapo
    >>> stapo.main(["objective", "--show", "--spec", "no-such-preset"])
    2
    """
    arguments = sys.argv[1:] if arguments is None else [os.fspath(argument) for argument in arguments]
    try:
        # Python's handler would only note the signal until the command returns. A signal that is ignored stays ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except ValueError:
        pass  # Not the main thread, which alone sets handlers.
    return _extension().main(arguments, sys.executable, ["-I", os.path.abspath(__file__)])


def _extension():
    """The extension module."""
    if __package__:
        from . import _stapo

        return _stapo
    stem = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_stapo")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if os.path.exists(stem + suffix):
            spec = importlib.util.spec_from_file_location("stapo._stapo", stem + suffix)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"{stem}: the extension module is not next to {__file__}")


if __name__ == "__main__":
    sys.exit(main())
