"""The pages that a newcomer walks through: what they show is run, or read by the program it is for."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from page_room import LEFT_BEHIND, Room, run_in_room, why_no_rooms
from test_docs import PAGES, reference

from hetlb.balancer.config.fleet import load_fleet
from hetlb.balancer.config.fleet_tables import FleetFile
from hetlb.balancer.config.profile_file import load_profile
from hetlb.cli.main import COMMANDS, build_parser
from hetlb.errors import ConfigErrors

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GETTING_STARTED = DOCS / "getting-started.md"
VLLM = ROOT / ".venv-vllm"

#: Before a block: `<!-- not run: why -->`; `<!-- file: NAME -->`, that it is the content of;
#: `<!-- printed by: COMMAND -->`, which stands in a block above.
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>not run|file|printed by): (?P<value>[^\n]+) -->\n)?"
    r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_HERE_DOCUMENT = re.compile(r"<<'EOF'(?P<rest>[^\n]*)\n.*?^EOF$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `why` it is not run, the `file` that it is, the command that printed it."""

    kind: str
    text: str
    line: int
    why: str | None = None
    file: str | None = None
    printed_by: str | None = None


_FIELDS = {"not run": "why", "file": "file", "printed by": "printed_by"}


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            found["kind"],
            found["text"],
            text.count("\n", 0, found.start("kind")) + 1,
            **({_FIELDS[found["mark"]]: found["value"]} if found["mark"] else {}),
        )
        for found in _BLOCK.finditer(text)
    ]


def shell_commands(script: str) -> Iterator[list[str]]:
    """The words of every command of a script, without redirections and variables set for it alone."""
    script = _HERE_DOCUMENT.sub(r"\g<rest>", script).replace("\\\n", " ")
    script = re.sub(r"\b[0-9](?=>)|(?:^|(?<=\s))#[^\n]*", "", script)
    lexer = shlex.shlex(script, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    redirected = False
    for token in [*lexer, "\n"]:
        if set(token) <= set("();<>|&\n"):
            if ">" not in token and "<" not in token and words:
                yield words
                words = []
            redirected = ">" in token or "<" in token
        elif redirected:
            redirected = False
        elif words or not re.match(r"\w+=", token):
            words.append(token)


def shown(command: str) -> list[tuple[str, list[str]]]:
    """Every use of `command` in the shell blocks of all pages, with where it stands."""
    found = []
    for page in PAGES:
        for block in blocks(page):
            if block.kind == "sh":
                for words in shell_commands(block.text):
                    # `docker stop hetlb` is none of ours; `docker run hetlb serve …` is.
                    found += [
                        (f"{page.name}:{block.line}", words[i + 1 :])
                        for i, word in enumerate(words)
                        if Path(word).name == command and (i == 0 or words[i + 1 : i + 2] == ["serve"])
                    ]
    return found


@pytest.mark.parametrize(("where", "arguments"), shown("hetlb"), ids=lambda value: str(value)[:60])
def test_every_command_in_a_shell_block_is_one(where: str, arguments: list[str]) -> None:
    if arguments == ["--version"]:
        return
    assert arguments[0] in COMMANDS, where
    # The policy of docs/policies.md is installed by that page.
    arguments = [word.replace("short-first", "hetlb") for word in arguments]
    build_parser(arguments[0]).parse_args(arguments)


def test_shell_blocks_are_read_as_a_shell_reads_them() -> None:
    script = "A=1 x 'b c' > log 2>&1 &\ncat > f <<'EOF'\nhetlb no\nEOF\ny \\\n  -d '{\n}' | z; w\n"
    assert list(shell_commands(script)) == [["x", "b c"], ["cat"], ["y", "-d", "{\n}"], ["z"], ["w"]]


# --- every block runs --------------------------------------------------------------------------------------

_ENGINE = (
    "hetlb engine --profile {profile} --served-model-name llama-3-8b --time-scale 0.05 {at} > {log} 2>&1 &\n"
)
_READY = "curl -sf --retry 60 --retry-delay 1 --retry-connrefused http://{at}/health\n"
_FAST, _SLOW = (f"configs/profiles/{name}-llama3-8b-tp1.yaml" for name in ("a800", "v100"))


def engine(host: str, port: int, profile: str) -> str:
    """Return the lines that start an emulated engine and wait for it."""
    log = f"$PAGE_LOGS/engine-{host}-{port}.log"
    line = _ENGINE.format(profile=profile, at=f"--host {host} --port {port}", log=log)
    return line + _READY.format(at=f"{host}:{port}")


_ENGINES = engine("gpu-a", 8000, _FAST) + engine("gpu-b", 8000, _SLOW)
_PROXY = "hetlb serve --instance http://gpu-a:8000 --instance http://gpu-b:8000\n"
_FLEET = """cat > fleet.yaml <<'EOF'
version: 1
models:
  - name: llama-3-8b
    instances:
      - {name: gpu-a, url: "http://gpu-a:8000", profile: configs/profiles/a800-llama3-8b-tp1.yaml}
      - {name: gpu-b, url: "http://gpu-b:8000", profile: configs/profiles/v100-llama3-8b-tp1.yaml}
EOF
"""
#: A running proxy with the fleet file in /etc, and files that its examples name.
_SERVICE = (
    "mkdir -p /etc/hetlb\nsleep() { command sleep 0.1; }\n"
    'sed "s|configs|$PWD/configs|" fleet.yaml > /etc/hetlb/fleet.yaml\n'
    "hetlb serve --config /etc/hetlb/fleet.yaml\n"
    "openssl req -x509 -newkey rsa:2048 -nodes -keyout tls.key -out tls.pem -subj /CN=h 2> /dev/null\n"
    "printf -- '- {name: a, sha256: \"%064d\"}\\n' 0 > keys.yaml\n"
)
_HOSTS = {"gpu-a": "127.0.0.2", "gpu-b": "127.0.0.3"}
#: The environment that `make` sets up with a network.
_MADE = (
    'mkdir .venv\nln -s "$(dirname "$(dirname "$PAGE_PYTHON")")"/{bin,lib,pyvenv.cfg} .venv\n'
    "touch .venv/.run .venv/.dev\n"
)
_CHECK = "hetlb serve --check --config {file}\n"


#: Three machines of four layers at most, for a model of eight.
_PLACE_FILES = """
echo node,gpu_type,region,max_layers,nic_in_bytes_per_s,nic_out_bytes_per_s > nodes.csv
for n in a b c; do echo $n,L4,r0,4,1e10,1e10 >> nodes.csv; done
echo from,to,bytes_per_s,latency_s > links.csv
for n in a b c; do
  echo source,$n,1e9,0.001 >> links.csv; echo $n,sink,1e9,0.001 >> links.csv
  for m in a b c; do [ $n = $m ] || echo $n,$m,1e9,0.001 >> links.csv; done
done
echo gpu_type,phase,batch_tokens,time_per_layer_ms > layer_time.csv
for row in prompt,0,0 prompt,4000,85 decode,0,0 decode,1,5 decode,101,10; do
  echo L4,$row >> layer_time.csv
done
echo gpu_type,layers,tokens_per_s,kv_entries_token_layer,prompt_max_requests,prompt_max_tokens,\
decode_max_tokens,decode_max_context_tokens > by_layers.csv
for n in 1 2 3 4; do echo L4,$n,$((2400 / n)),600000,3,6144,300,300000 >> by_layers.csv; done
echo '{"num_layers": 8, "activation_bytes_per_token": 13312, "token_bytes": 2}' > model.json
"""


@dataclass(frozen=True)
class Page:
    """Setup that a page takes for granted (`before` its blocks), and smaller figures: time and load alone."""

    before: str = ""
    smaller: Mapping[str, str] = field(default_factory=dict)
    addresses: Mapping[str, str] = field(default_factory=dict)
    #: Commands after the last block.
    after: str = ""
    #: Lines that read a YAML block that is no file of the page, by the program that it is for.
    reader: str = _CHECK


PAGE_BY_NAME = {
    "README.md": Page(
        _MADE
        + _ENGINES
        + "pip install .\nhetlb serve --policy rr --host your-balancer --port 80 --admin-port 8091 "
        "--instance http://gpu-a:8000 --instance http://gpu-b:8000\npip uninstall -y hetlb\n",
        {
            "make test ": "make --dry-run test ",
            "--request-rate 8 --num-prompts 500": "--request-rate 80 --num-prompts 100",
            "--request-rate 8 --compare": "--request-rate 80 --num-prompts 100 --compare",
            "hetlb profile --url": "hetlb profile --budget 1m --repeats 1 --url",
        },
        {**_HOSTS, "your-balancer": "127.0.0.4"},
    ),
    "getting-started.md": Page(
        smaller={
            "hetlb engine --profile": "hetlb engine --time-scale 0.05 --profile",
            "--num-prompts 180 --request-rate 12": "--num-prompts 24 --request-rate 240",
            "--budget 1m": "--budget 1m --repeats 1",
        },
        after="wait\n",  # all that it starts ends
    ),
    "bench.md": Page(
        _ENGINES + _PROXY,
        {
            "--request-rate 8 ": "--request-rate 80 --num-prompts 100 ",
            "--rounds 5": "--rounds 2",
            "--request-rate 2,4,8,16": "--request-rate 40,80 --num-prompts 40",
        },
        _HOSTS,
    ),
    "configuration.md": Page(
        f"mkdir profiles\ncp {_SLOW} profiles/v100.yaml\n",
        reader="""if grep -q sha256 {file}; then
  printf 'version: 1\\nproxy: {{api_keys_file: %s}}\\n' {file} > with-keys.yaml
  printf 'models: [{{name: llama-3-8b, instances: [{{name: a, url: "http://a:1"}}]}}]\\n' >> with-keys.yaml
  hetlb serve --check --config with-keys.yaml
else
  hetlb serve --check --config {file}
fi
""",
    ),
    "dashboard.md": Page(
        engine("gpu-a", 8000, _FAST)
        + "export HETLB_ADMIN_TOKEN=secret\n"
        + "for host in 127.0.0.1 10.0.0.1; do cat > $host.yaml <<EOF\nversion: 1\n"
        + "listen: {host: $host, port: 8080}\n"
        + "admin: {host: $host, port: 8081, token_env: HETLB_ADMIN_TOKEN}\n"
        + "models:\n  - name: llama-3-8b\n    instances:\n"
        + '      - {name: a800-0, url: "http://gpu-a:8000"}\n'
        + '      - {name: v100-0, url: "http://gpu-b:8000"}\n'
        + '      - {name: v100-1, url: "http://gpu-b:8001"}\n'
        + "EOF\nhetlb serve --config $host.yaml\ndone\nhetlb status || test $? = 1\n",
        addresses={**_HOSTS, "there": "10.0.0.1"},
    ),
    "engines.md": Page(),
    "disaggregation.md": Page(
        f"cp {_FAST} h100.yaml\ncp {_SLOW} l40s.yaml\ncp {_SLOW} h20.yaml\n",
        reader="sed -i '1i version: 1' {file}\n" + _CHECK,
    ),
    "discovery.md": Page(
        "mkdir profiles instances.d\n"
        + "".join(f"cp {_FAST} profiles/{name}.yaml\n" for name in ("h100", "h100-tp2", "l40s")),
        reader="if grep -q services {file}; "
        "then python -c 'import sys, yaml; yaml.safe_load(open(sys.argv[1]))[\"services\"]' {file}; "
        "else hetlb serve --check --config {file}; fi\n",
        addresses={"vllm": "127.0.0.5"},
    ),
    "metrics.md": Page(
        _ENGINES + _PROXY,
        addresses=_HOSTS,
        reader='curl -sf "http://$(grep -o \'127[0-9.:]*\' {file})/metrics" | grep hetlb_requests_total\n',
    ),
    "migrating.md": Page(
        _ENGINES,
        addresses=_HOSTS,
    ),
    "placement.md": Page(
        "cp configs/placements/llama-70b.yaml place.yaml\n"
        "sed -i 's|../../profiling|profiling|' place.yaml\n"
        "printf 'input_tokens,output_tokens\\n374,44\\n396,109\\n' > L.csv\n"
        "hetlb place --config place.yaml --time-limit 5 --json > plan.json\n"
        'python -c \'import json; print(json.dumps(json.load(open("plan.json"))["placement"]))\' > P.json\n'
        "cp profiling/l40s-llama-3.1-70b-tp1.yaml l40s.yaml\n"
        "cp l40s.yaml a100.yaml\n"
        + _PLACE_FILES,
        {
            "hetlb place --config place.yaml   ": "hetlb place --config place.yaml --time-limit 5 ",
            "--simulate 600 --lengths": "--simulate 20 --time-limit 20 --lengths",
            "P.json --simulate 600": "P.json --simulate 20",
        },
        reader="hetlb place --config {file} --time-limit 5\n",
    ),
    "policies.md": Page(
        _FLEET + "mkdir mine\nsed -i 's|configs|../configs|' fleet.yaml\nmv fleet.yaml mine\n"
        "cp hetlb/tools/demo/trace.csv mine\npip install .\ncd mine\n",
        {"--trace trace.csv": "--trace trace.csv --num-prompts 50"},
    ),
    "profiles.md": Page(
        engine("127.0.0.1", 8000, _FAST)
        + "sed s/Llama-3.1-8B,8,/Llama-3.1-8B,4,/ tests/profiler/data/l40s-llama-3.1-8b.csv > grid.csv\n"
        + f"cp {_FAST} a.yaml\ncp {_SLOW} b.yaml\n"
        + "cp configs/clusters/llama-3.1-70b.config.json config.json\n",
        {"--system H100 ": "--system H100 --budget 1m --repeats 1 "},
    ),
    "renting.md": Page(
        "cp configs/markets/llama-8b.yaml market.yaml\nsed -i 's|../../|./|g' market.yaml\n"
        "head -200 bench/data/azure-conv-sample.csv > T.csv\npip install .\n"
        "hetlb rent --config market.yaml --no-simulate --json > plan.json\n",
        {
            "--replan plan.json": "--no-simulate --time-limit 20 --replan plan.json",
            # Beside load the same plan is found, later.
            "llama-8b.yaml --write-fleet": "llama-8b.yaml --time-limit 600 --write-fleet",
        },
    ),
    "scale-out.md": Page(_MADE + _FLEET + _ENGINES, addresses=_HOSTS),
    "search.md": Page(
        "cp configs/clusters/v100-llama-3-8b.yaml cluster.yaml\nsed -i 's|../../|./|g' cluster.yaml\n"
        "head -400 bench/data/azure-conv-sample.csv > t.csv\n",
        {"--write-fleet fleet.yaml": "--num-prompts 400 --write-fleet fleet.yaml"},
    ),
    "simulator.md": Page(
        engine("127.0.0.1", 8000, _FAST).replace("--time-scale 0.05 ", "")
        + "hetlb bench --url http://127.0.0.1:8000 --trace hetlb/tools/demo/trace.csv --request-rate 20 "
        "--num-prompts 200 --save-result --save-detailed --result-filename LOG\n"
        f"cp {_FAST} P.yaml\n",
        {"--request-rate 50,100,200,inf": "--num-prompts 200 --request-rate 50,100,200,inf"},
    ),
    "split.md": Page(
        "cp configs/clusters/split-llama-8b.yaml cluster.yaml\nsed -i 's|../../|./|g' cluster.yaml\n"
        "sed -i 's/gpus: [0-9]*/gpus: 2/; s/, 4: [^}]*//' cluster.yaml\n"
        "head -200 bench/data/azure-conv-sample.csv > trace.csv\n"
        + "".join(f"cp profiling/a100_sxm-llama-3.1-8b-tp{n}.yaml a100-tp{n}.yaml\n" for n in (1, 2, 4)),
        reader="hetlb split --config {file} --time-limit 5\n",
    ),
    "stages.md": Page(
        "mkdir -p /models/llama-70b\nPYTHONPATH=tests python -c 'from pathlib import Path; "
        'from stage.toy import make_folder; make_folder(Path("/models/llama-70b"))\'\n'
        "openssl rand -hex 32 > stage.key\n"
    ),
    "tasks.md": Page(
        _FLEET
        + _ENGINES
        + _SERVICE
        + "mkdir -p /opt/hetlb-new/bin\n"
        + 'ln -s "$(which hetlb)" /opt/hetlb-new/bin\n'
        + '/opt/hetlb-new/bin/hetlb() { hetlb "$@"; }\n'
        + "ssh() { :; }\n"
        + engine("gpu-c", 8000, _FAST),
        addresses={**_HOSTS, "gpu-c": "127.0.0.5"},
        reader='cp tls.pem tls.key keys.yaml "$(dirname {file})" 2> /dev/null || true\n' + _CHECK,
    ),
    "teams.md": Page(
        _FLEET
        + _ENGINES
        + _SERVICE
        + """for n in 1 2 3; do
  echo '{"custom_id": "'$n'", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "llama-3-8b",
    "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}}' | tr -d '\\n'; echo
done > in.jsonl
""",
        addresses=_HOSTS,
    ),
}  # fmt: skip


def script_of(path: Path, page: Page) -> str:
    """Return the script of a page: its blocks in order; every YAML block is read by its program."""
    lines = [page.before]
    for block in blocks(path):
        if block.why is not None:
            continue
        lines.append(f"echo '=== line {block.line}'")
        if block.kind == "sh":
            lines.append(block.text)
        elif block.file is not None or block.kind == "yaml":
            name = block.file or f"shown-{block.line}.yaml"
            lines.append(f"cat > {name} <<'END-OF-BLOCK'\n{block.text}END-OF-BLOCK")
            if block.file is None:
                lines.append(page.reader.format(file=name))
    text = "\n".join([*lines, page.after])
    for shown_text, smaller in page.smaller.items():
        assert shown_text in text, shown_text
        text = text.replace(shown_text, smaller)
    return text


def walk(folder: Path, name: str) -> str:
    """Run the blocks of a page in order in one shell; return what they printed."""
    page, path = PAGE_BY_NAME[name], ROOT / name if name == "README.md" else DOCS / name
    status, said = run_in_room(Room(script_of(path, page), page.addresses), folder)
    logs = "".join(f"\n--- {log.name}\n{log.read_text()[-1000:]}" for log in sorted(folder.rglob("*.log")))
    assert status == 0, f"exit status {status}\n{said[-6000:]}{logs[-4000:]}"
    for block in blocks(path):
        if block.printed_by is not None:
            assert_printed(block.text, said)
    return said


_FIGURE = re.compile(r"[+-]?\d[\d.,]*(?: ?(?:ms|us|s|%)(?!\w))?|(?<=\s)-(?=\s|$)")


def assert_printed(shown_text: str, said: str) -> None:
    """Fail unless the lines shown were printed in this order; figures, frames and folds may differ."""

    def plain(text: str) -> str:
        return " ".join(_FIGURE.sub("#", re.sub("[\u2500-\u257f]+", " ", text)).split())

    rest = plain(said)
    for line in map(plain, shown_text.splitlines()):
        if line and not line.startswith("$ "):
            before, found, rest = rest.partition(line)
            assert found, f"not printed: {line}\n{before[-3000:]}"


def test_what_was_printed_is_compared_without_its_figures() -> None:
    assert_printed("a  4.6 s  -\nb 12 %\n", "x\na 320 ms 5\ny\nb  7%\n")
    with pytest.raises(AssertionError, match="not printed: b"):
        assert_printed("a 1\nb 2\n", "b 2\na 1\n")


#: Kinds of blocks: what a shell runs, files, and text to look at.
KINDS = {"sh", "yaml", "python", "toml", "text"}


def test_every_page_with_blocks_is_walked_and_every_block_has_a_kind() -> None:
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        found = blocks(path)
        assert path.read_text().count("\n```") == 2 * len(found), path.name
        for block in found:
            assert block.kind in KINDS, f"{path.name}:{block.line}"
            assert block.kind not in ("python", "toml") or block.file, f"{path.name}:{block.line}"
        if any(block.why is None and block.kind != "text" for block in found):
            assert path.name in PAGE_BY_NAME, path.name


#: Needs of a block that no room has; what else is in it is checked: commands by their parsers, files.
NEEDS = {
    "README.md runs the same",
    "another program's",
    "installs",
    "needs NVIDIA's aiconfigurator",
    "needs a cluster",
    "needs a container engine",
    "needs a Valkey server",
    "needs a network and GPUs",
    "needs systemd",
    "needs torch and the weights of a model",
    "needs two GPUs",
}


def test_what_is_not_run_needs_what_a_room_has_not_and_names_files_that_are_there() -> None:
    files = 0
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in blocks(path):
            if block.why is not None:
                assert block.why in NEEDS, f"{path.name}:{block.line}"
                for name in re.findall(r"(?<![\w./])(?:configs|profiling|bench)/[\w./*-]+", block.text):
                    assert list(ROOT.glob(name)), f"{path.name}:{block.line}: {name}"
                    files += 1
    assert files > 5


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.skipif(bool(why_no_rooms()), reason=why_no_rooms() or "there are rooms")
@pytest.mark.parametrize("name", sorted(PAGE_BY_NAME.keys() - {"getting-started.md"}))
def test_every_block_of_a_page_runs_as_it_is_written(name: str, tmp_path: Path) -> None:
    walk(tmp_path, name)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.skipif(bool(why_no_rooms()), reason=why_no_rooms() or "there are rooms")
def test_getting_started_leads_from_nothing_to_a_report(tmp_path: Path) -> None:
    said = walk(tmp_path, "getting-started.md")
    folder = tmp_path / "clone" / "first-steps"

    assert re.search(r"^x-hetlb-instance: (h100|l40s)\r?$", said, re.MULTILINE | re.IGNORECASE)
    assert LEFT_BEHIND not in said

    compared = json.loads((folder / "compare.json").read_text())
    assert [run["policy"] for run in compared["runs"]].count("hetlb") == 3
    assert {run["policy"] for run in compared["runs"]} == {"rr", "least-requests", "hetlb"}
    for run in compared["runs"]:
        assert (run["completed"], run["failed"]) == (24, 0)
        assert {each["name"] for each in run["instances"]} <= {"h100", "l40s"}
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")

    for name in ("h100", "l40s"):
        profile = load_profile(folder / f"{name}.yaml")
        assert profile.source is not None
        assert (profile.source.kind, profile.source.measured) == ("live", True)
    assert {spec.name: spec.latency is not None for spec in load_fleet(folder / "fleet.yaml").instances} == {
        "h100": True,
        "l40s": True,
    }
    assert re.search("event=reloaded .*0 instances out, 0 in, 2 changed", said)

    fleet, _ = json.JSONDecoder().raw_decode(said, said.index('{"policy"'))
    states = {each["name"]: each["state"] for each in fleet["models"][0]["instances"]}
    assert states == {"h100": "ready", "l40s": "drain"}


def test_what_getting_started_does_not_run_says_why() -> None:
    skipped = [block for block in blocks(GETTING_STARTED) if block.why is not None]
    assert [block.why for block in skipped] == ["needs two GPUs"]
    # What needs a GPU differs from what is run in who answers, and in nothing that comes after.
    real = list(shell_commands(skipped[0].text))
    assert [words[:2] for words in real] == [["vllm", "serve"]] * 2
    emulated = "".join(block.text for block in blocks(GETTING_STARTED) if "hetlb engine" in block.text)
    for words in real:
        for flag in ("--served-model-name", "--port"):
            assert f"{flag} {words[words.index(flag) + 1]} " in emulated


_VLLM_PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for arguments in json.load(sys.stdin):
    make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    print("ok")
"""


def vllm_accepts(commands: list[list[str]]) -> None:
    """Each is what follows `vllm serve`; vLLM's own parser reads it."""
    result = subprocess.run(
        [str(VLLM / "bin" / "python"), "-c", _VLLM_PARSER],
        input=json.dumps(commands), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.stdout.split() == ["ok"] * len(commands), result.stderr[-2000:]


@pytest.mark.vllm
def test_vllm_knows_the_flags_that_the_pages_show() -> None:
    commands = [arguments[1:] for _, arguments in shown("vllm")]
    assert commands
    vllm_accepts(commands)


# --- the other pages ---------------------------------------------------------------------------------------


def test_every_fleet_file_shown_is_one(tmp_path: Path) -> None:
    """Profiles and keys that a file names are not there: all else is as it should be."""
    shown_here = [block.text for page in PAGES for block in blocks(page) if block.kind == "yaml"]
    fleets = [text for text in shown_here if text.startswith("version: 1\nmodels:")]
    assert fleets
    for number, text in enumerate(fleets):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        try:
            wrong = [] if load_fleet(path).instances else ["no instances"]
        except ConfigErrors as found:
            wrong = [line for line in found.lines if "no such file" not in line]
        assert wrong == [], text


def test_each_section_of_the_fleet_file_is_shown_in_a_guide() -> None:
    """Each stands in a block that a reader can copy, and so do the names of models."""
    every = [block for page in DOCS.glob("*.md") for block in blocks(page)]
    shown = "\n".join(block.text for block in every if block.kind in ("yaml", "sh"))
    keys = {key.path.partition(".")[0].partition("[")[0] for key in reference().keys_of(FleetFile)}
    assert len(keys) > 10
    assert {key for key in keys if not re.search(rf"^(?:printf ')?{key}:", shown, re.MULTILINE)} == set()
    names = {"aliases", "fallback", "canary", "classes"}
    assert {key for key in names if not re.search(rf"\b{key}:", shown)} == set()


def test_every_key_named_exists() -> None:
    files = reference().FILES
    known = [key.path for _, _, table in files for key in reference().keys_of(table)]
    pattern = r"`((?:listen|admin|policy|queue|health|scrape|proxy|pick|models\[\])\.[a-z_.\[\]]+)[`:]"
    for page in PAGES:
        if page.name not in ("CHANGELOG.md", "experiments.md"):  # these tell of former keys too
            for key in re.findall(pattern, page.read_text()):
                assert any(each == key or each.startswith((f"{key}.", f"{key}[")) for each in known), (
                    page.name,
                    key,
                )


def test_the_table_of_contents_has_every_page() -> None:
    contents = (DOCS / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in contents, page.name
