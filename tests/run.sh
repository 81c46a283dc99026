#!/usr/bin/env bash
# tests/run.sh NAME PYTHON ARGUMENT...: pytest with these arguments, with a record of what failed under NAME.
# With HETLB_MOST_AGAIN=3, as in .ci/run, up to three tests that failed beside others are run once more, alone.
# What passes only then is named at the end: it is a fault to be mended, and it stops nobody's change.
set -uo pipefail
name=$1 python=$2
shift 2
record=.cache/pytest-$name
"$python" -m pytest -o cache_dir="$record" "$@"
status=$?
failed=$record/v/cache/lastfailed
[ "$status" = 1 ] && [ -s "$failed" ] || exit "$status"
named=$("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$failed") || exit "$status"
[ "$(wc -l <<< "$named")" -le "${HETLB_MOST_AGAIN:-0}" ] || exit "$status"
echo "once more, alone: $named" >&2
"$python" -m pytest -o cache_dir="$record" "$@" -n 0 --last-failed --last-failed-no-failures none || exit
echo "passed only alone, to be mended: $named" >&2
