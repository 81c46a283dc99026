"""`hetlb`: runs a command and maps errors to one line and an exit status.

Exit status: 0 done, 2 wrong usage or input (one line on stderr), 1 anything else. Ctrl-C ends at once.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

from hetlb.build import version_line
from hetlb.errors import HetlbError, InputError
from hetlb.extras import missing_extra, require
from hetlb.files import expect_pipes


class Command(NamedTuple):
    """Summary and example of a command."""

    summary: str
    example: str


class CommandModule(Protocol):
    """The module of a command."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None:
        """Declare its flags."""

    def run(self, args: argparse.Namespace, /) -> int:
        """Return the exit status."""


COMMANDS = {
    "demo": Command("compare policies on this machine, without a GPU", "hetlb demo"),
    "serve": Command("run the reverse proxy in front of a fleet", "hetlb serve --config fleet.yaml"),
    "init": Command(
        "ask servers and print a commented fleet file",
        "hetlb init http://10.0.0.7:8000 http://10.0.0.8:8000 > fleet.yaml",
    ),
    "doctor": Command("check a fleet file and its servers for mistakes", "hetlb doctor --config fleet.yaml"),
    "pick": Command(
        "run the endpoint picker for Envoy and the Gateway API", "hetlb pick --config fleet.yaml"
    ),
    "engine": Command(
        "emulate a vLLM server, timed by a latency profile", "hetlb engine --profile P.yaml --port 8000"
    ),
    "simulate": Command(
        "run a fleet in virtual time, or replay an event log",
        "hetlb simulate --config fleet.yaml --trace T.csv --policy rr,hetlb",
    ),
    "model": Command("print the weights, cache and parallel degrees of a model", "hetlb model config.json"),
    "profile": Command(
        "make, show, compare and list latency profiles",
        "hetlb profile --url http://10.0.0.7:8000 --out a800.yaml",
    ),
    "search": Command(
        "find the best tensor-parallel degrees and layouts for given machines",
        "hetlb search --config CLUSTER.yaml --trace T.csv",
    ),
    "stage": Command(
        "run some layers of a model, or the coordinator in front of such workers",
        "hetlb stage --model FOLDER --layers 0:16 --port 9100",
    ),
    "place": Command(
        "plan the layers of a model that no single machine can hold", "hetlb place --config PLACE.yaml"
    ),
    "split": Command(
        "plan GPUs for prefill and for decode, with the KV flows between them",
        "hetlb split --config CLUSTER.yaml --trace T.csv",
    ),
    "rent": Command(
        "plan which GPUs to rent for a budget, and what to run on them",
        "hetlb rent --config MARKET.yaml --trace T.csv",
    ),
    "bench": Command(
        "load-test any OpenAI-compatible server",
        "hetlb bench --url http://127.0.0.1:8080 --dataset-name random --request-rate 8",
    ),
    "batch": Command(
        "send OpenAI's batch file to any server, in the capacity that its other traffic leaves",
        "hetlb batch in.jsonl out.jsonl --url http://127.0.0.1:8080",
    ),
    "explain": Command(
        "print one decision in numbers, or the last ones of a running proxy", "hetlb explain --last 3"
    ),
    "status": Command(
        "print the state of the fleet in one line, with an exit status for scripts",
        "hetlb status --admin http://127.0.0.1:8081 || notify-the-operator",
    ),
    "drain": Command("give an instance no new requests, e.g. before its restart", "hetlb drain gpu-a --wait"),
    "ready": Command("give an instance requests again", "hetlb ready gpu-a --wait"),
    "maint": Command("take an instance out: no requests and no probes", "hetlb maint gpu-a --wait"),
    "policy": Command("print or switch the policy of a running proxy", "hetlb policy hetlb"),
    "top": Command("show the live fleet in a terminal", "hetlb top --admin http://127.0.0.1:8081"),
    "schema": Command(
        "print the JSON schema of a kind of file, for editors", "hetlb schema fleet > fleet.json"
    ),
    "completion": Command(
        "print the completion script for bash, zsh, fish or tcsh", "hetlb completion bash > hetlb.bash"
    ),
}
#: Commands with examples in `hetlb --help`.
_FIRST = ("demo", "init", "doctor", "serve", "status")
#: Commands that print the finished part when they are interrupted.
_REPORTING = ("bench", "batch")
#: Arguments that name files of requests.
_REQUESTS = ("trace", "dataset_path", "lengths", "requests")
#: Commands that print a document with `--json` also if no proxy answers.
_ASKING = ("status", "top", "explain", "drain", "ready", "maint", "policy")


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises its errors as `InputError`."""

    def error(self, message: str) -> NoReturn:
        from hetlb.cli.completion import suggestion

        meant = suggestion(message, list(actions(self)))
        raise InputError(f"{message.removeprefix('argument ')}{meant} (see {self.prog} --help)")


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a parser and of its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from actions(each)


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, or with the flags of `only` one.

    A command without its extra gets no flags; its help says how to install the extra.
    """
    parser = _Parser(
        prog="hetlb",
        description="A reverse proxy that makes a mixed fleet of vLLM servers deliver its whole throughput.",
        epilog="examples:\n" + "\n".join(f"  {COMMANDS[name].example}" for name in _FIRST),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_line())
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, each in COMMANDS.items():
        sub = subparsers.add_parser(
            name,
            help=each.summary,
            description=each.summary[0].upper() + each.summary[1:] + ".",
            epilog=f"example:\n  {each.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if only not in (None, name):
            continue
        try:
            _module(name).add_arguments(sub)
            if any(action.dest in _REQUESTS for action in actions(sub)):
                from hetlb.cli.request_files import add_input_limit

                add_input_limit(sub)
        except ModuleNotFoundError as error:
            missing = missing_extra(error)
            if missing is None:
                raise
            sub.set_defaults(missing=missing)
            sub.epilog = f"flags: {missing}\n\n{sub.epilog}"
    return parser


def _module(command: str) -> CommandModule:
    """Import the module of a command alone: `hetlb engine` must not load what `hetlb demo` needs."""
    match command:
        case "demo":
            from hetlb.cli import demo

            return demo
        case "serve":
            from hetlb.cli import serve

            return serve
        case "init":
            from hetlb.cli import init

            return init
        case "doctor":
            from hetlb.cli import doctor

            return doctor
        case "pick":
            from hetlb.cli import pick

            return pick
        case "engine":
            from hetlb.cli import engine

            return engine
        case "simulate":
            from hetlb.cli import simulate

            return simulate
        case "model":
            from hetlb.cli import model

            return model
        case "profile":
            from hetlb.cli import profile

            return profile
        case "search":
            from hetlb.cli import search

            return search
        case "stage":
            from hetlb.cli import stage

            return stage
        case "place":
            from hetlb.cli import place

            return place
        case "split":
            from hetlb.cli import split

            return split
        case "rent":
            from hetlb.cli import rent

            return rent
        case "bench":
            from hetlb.cli import bench

            return bench
        case "batch":
            from hetlb.cli import batch

            return batch
        case "explain":
            from hetlb.cli import explain

            return explain
        case "top":
            from hetlb.cli import top

            return top
        case "schema":
            from hetlb.cli import schema

            return schema
        case "completion":
            from hetlb.cli import completion

            return completion
        case _:
            from hetlb.cli import switches

            return switches


def _parsed(arguments: Sequence[str], command: str) -> argparse.Namespace:
    """Return the parsed arguments. Raises `InputError`."""
    parser = build_parser(command if command in COMMANDS else "")
    known, unknown = parser.parse_known_args(arguments)
    if (missing := getattr(known, "missing", None)) is not None:
        raise missing
    return parser.parse_args(arguments) if unknown else known


def _open_standard_files() -> None:
    """Open closed standard files (`>&-`): a socket would get the number of one."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def _drop_output() -> None:
    """Drop what stdout still holds, so that no traceback comes at exit.

    Its reader has gone (`| head`), or its disk is full.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    began_s = time.monotonic()
    _open_standard_files()
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    command = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        args = _parsed(arguments, command or "")
        if getattr(args, "plot", None) is not None:
            require("matplotlib")  # before the work, not after it
        expect_pipes(
            path
            for value in vars(args).values()
            for path in (value if isinstance(value, list) else [value])
            if isinstance(path, Path)
        )
        if hasattr(args, "max_input_mib"):
            from hetlb.tools.workload.input_limit import set_limit

            set_limit(args.max_input_mib)
        args.began_s = began_s
        args.command_line = shlex.join(["hetlb", *arguments])
        status = _module(args.command).run(args)
        sys.stdout.flush()
        return int(status)
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        print(f"hetlb {command}: {missing}", file=sys.stderr)
        return 2
    except InputError as error:
        if command in _ASKING and "--json" in arguments:
            try:
                print(json.dumps({"error": str(error)}), flush=True)
            except OSError:  # it stands below, too
                _drop_output()
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
    except MemoryError:
        print(f"hetlb {command}: expected input that fits into this machine's memory", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        if error.errno != errno.EPIPE:
            print(f"hetlb {command}: the output could not be written: {error.strerror}", file=sys.stderr)
        return 1
