"""`hetlb`: runs a command and maps errors to one line and an exit status.

Exit status: 0 done, 2 wrong usage or input (one line on stderr), 1 anything else. Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

from hetlb.build import version_line
from hetlb.errors import HetlbError, InputError
from hetlb.extras import missing_extra, require


class Command(NamedTuple):
    """Summary and example of a command."""

    summary: str
    example: str


#: Each has a module with `add_arguments`, which declares its flags, and `run`, which returns the exit status.
#: They are imported on demand: `hetlb engine` must not load what `hetlb demo` needs.
COMMANDS = {
    "demo": Command("a comparison of policies on this machine, without a GPU", "hetlb demo"),
    "serve": Command("the reverse proxy in front of a fleet", "hetlb serve --config fleet.yaml"),
    "init": Command(
        "a commented fleet file from what servers say",
        "hetlb init http://10.0.0.7:8000 http://10.0.0.8:8000 > fleet.yaml",
    ),
    "doctor": Command(
        "a look for mistakes in a fleet file and at its servers", "hetlb doctor --config fleet.yaml"
    ),
    "pick": Command("the endpoint picker for Envoy and the Gateway API", "hetlb pick --config fleet.yaml"),
    "engine": Command(
        "an emulated vLLM server, timed by a latency profile", "hetlb engine --profile P.yaml --port 8000"
    ),
    "simulate": Command(
        "a fleet in virtual time, or the replay of an event log",
        "hetlb simulate --config fleet.yaml --trace T.csv --policy rr,hetlb",
    ),
    "model": Command("what hetlb understands of a model: weights, cache, degrees", "hetlb model config.json"),
    "profile": Command(
        "latency profiles: make, show, compare, list",
        "hetlb profile --url http://10.0.0.7:8000 --out a800.yaml",
    ),
    "search": Command(
        "the best tensor-parallel degrees and layouts for given machines",
        "hetlb search --config CLUSTER.yaml --trace T.csv",
    ),
    "stage": Command(
        "a worker that runs some layers of a model, or the coordinator in front of such workers",
        "hetlb stage --model FOLDER --layers 0:16 --port 9100",
    ),
    "place": Command(
        "a plan for the layers of a model that no single machine can hold", "hetlb place --config PLACE.yaml"
    ),
    "split": Command(
        "a plan of GPUs for prefill and for decode, with the KV flows between them",
        "hetlb split --config CLUSTER.yaml --trace T.csv",
    ),
    "rent": Command(
        "a plan of which GPUs to rent for a budget, and what to run on them",
        "hetlb rent --config MARKET.yaml --trace T.csv",
    ),
    "bench": Command(
        "a load test of any OpenAI-compatible server",
        "hetlb bench --url http://127.0.0.1:8080 --dataset-name random --request-rate 8",
    ),
    "batch": Command(
        "OpenAI's batch file through any server, in what its other traffic leaves over",
        "hetlb batch in.jsonl out.jsonl --url http://127.0.0.1:8080",
    ),
    "explain": Command(
        "one decision in numbers, or the last ones of a running proxy", "hetlb explain --last 3"
    ),
    "status": Command(
        "the fleet in one line, with an exit status for scripts",
        "hetlb status --admin http://127.0.0.1:8081 || notify-the-operator",
    ),
    "top": Command("the live fleet in a terminal", "hetlb top --admin http://127.0.0.1:8081"),
    "schema": Command("the JSON schema of a kind of file, for editors", "hetlb schema fleet > fleet.json"),
    "completion": Command(
        "the completion script for bash, zsh, fish or tcsh", "hetlb completion bash > hetlb.bash"
    ),
}
#: Commands whose examples `hetlb --help` shows.
_FIRST = ("demo", "init", "doctor", "serve", "status")
#: Commands that print the finished part when they are interrupted.
_REPORTING = ("bench", "batch")


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are an `InputError`."""

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            close = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        elif wrong := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            flags = {flag for action in actions(self) for flag in action.option_strings}
            close = difflib.get_close_matches(wrong[1], sorted(flags), n=1)
            message += f"; did you mean {close[0]}?" if close else ""
        raise InputError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from actions(each)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, or with the flags of `only` one.

    A command whose extra is not installed gets no flags; its help says how to install them.
    """
    parser = _Parser(
        prog="hetlb",
        description="A reverse proxy that makes a mixed fleet of vLLM servers deliver its whole throughput.",
        epilog="examples:\n" + "\n".join(f"  {COMMANDS[name].example}" for name in _FIRST),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_line())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, example) in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only not in (None, name):
            continue
        try:
            importlib.import_module(f"hetlb.cli.{name}").add_arguments(sub)
        except ModuleNotFoundError as error:
            missing = missing_extra(error)
            if missing is None:
                raise
            sub.set_defaults(missing=missing)
            sub.epilog = f"flags: {missing}\n\n{sub.epilog}"
    return parser


def _parsed(arguments: Sequence[str], command: str) -> argparse.Namespace:
    """Return the parsed arguments. Raises `InputError`."""
    parser = build_parser(command if command in COMMANDS else "")
    known, unknown = parser.parse_known_args(arguments)
    if (missing := getattr(known, "missing", None)) is not None:
        raise missing
    return parser.parse_args(arguments) if unknown else known


def _open_standard_files() -> None:
    """Open what was closed for this process (`>&-`): a socket would get its number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    _open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        args = _parsed(arguments, command or "")
        if getattr(args, "plot", None) is not None:
            require("matplotlib")  # before the work, not after it
        args.command_line = shlex.join(["hetlb", *arguments])
        status = importlib.import_module(f"hetlb.cli.{args.command}").run(args)
        sys.stdout.flush()
        return int(status)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        print(f"hetlb {command}: {missing}", file=sys.stderr)
        return 2
    except InputError as error:
        for line in error.lines:
            print(f"{' '.join(filter(None, ('hetlb', command)))}: {line}", file=sys.stderr)
        return 2
    except HetlbError as error:
        print(f"hetlb {command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if command in _REPORTING:
            print(f"hetlb {command}: interrupted", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        # The reader of stdout has gone (`| head`), or its disk is full: avoid the traceback at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"hetlb {command}: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
