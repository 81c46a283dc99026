#!/bin/sh
# Makes .venv-vllm in the root of the repository: real vLLM on CPU, as tests/vllm/requirements.txt pins it.
#
# Promises:
# - needs python3.11 (or python3 >= 3.11) and pip, and a package index; no compiler, no GPU, no root;
# - a second run with an unchanged list does nothing and takes no time;
# - an interrupted run leaves no stamp, and the next one starts from nothing (pip's cache keeps what was
#   downloaded), so that a half-made environment is never used;
# - of two runs at once the second waits for the first (where flock exists).
set -eu

here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
root=$(CDPATH= cd -- "$here/../.." && pwd)
venv=$root/.venv-vllm
stamp=$venv/.installed
list=$here/requirements.txt

say() { printf '%s\n' "install.sh: $*" >&2; }

wanted=$(cat "$list" "$here/install.sh" | cksum)
installed() { [ -x "$venv/bin/python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; }

installed && exit 0

if command -v flock >/dev/null 2>&1; then
    mkdir -p "$root/.cache"
    exec 9>"$root/.cache/vllm-install.lock"
    flock 9
    installed && exit 0
fi

python=
for candidate in python3.11 python3.12 python3.13 python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || { say "needs Python 3.11 or newer, found none"; exit 1; }

say "making $(basename "$venv") with $("$python" --version 2>&1), about 1.5 minutes and 3.5 GB"
rm -rf "$venv"
if "$python" -m venv "$venv" >/dev/null 2>&1; then
    pip() { "$venv/bin/python" -m pip "$@"; }
else
    # Some systems leave ensurepip out of Python: then the system's own pip fills the environment.
    rm -rf "$venv"
    "$python" -m venv --without-pip "$venv"
    pip() { "$python" -m pip --python "$venv/bin/python" "$@"; }
fi

# The CPU build of torch (2.13.0+cpu) is not on PyPI. Where the configured index or find-links has it,
# nothing else is asked; elsewhere PyTorch's own index is added.
log=$venv/pip.log
fill() { pip install --quiet --no-input --disable-pip-version-check --no-deps --requirement "$list" "$@" >"$log" 2>&1; }
if ! fill; then
    say "not all of it is on the configured index; trying again with download.pytorch.org for torch"
    if ! fill --extra-index-url https://download.pytorch.org/whl/cpu; then
        tail -n 20 "$log" >&2
        say "pip failed; its whole output is in $log"
        exit 1
    fi
fi

"$venv/bin/python" -c 'import torch, transformers, vllm' >"$log" 2>&1 || {
    tail -n 20 "$log" >&2
    say "vLLM was installed but does not import"
    exit 1
}
printf '%s\n' "$wanted" >"$stamp"
say "done"
