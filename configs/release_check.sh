#!/usr/bin/env bash
# Tries a built wheel as a stranger would: empty environment, empty HOME, no clone. Usage: release_check.sh DIST [PYTHON]
set -euo pipefail
dist=$(cd "$1" && pwd)
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)
room=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null || true; wait; rm -rf "$room"' EXIT
export HOME=$room/home
mkdir "$HOME"
version=$(cd "$here/.." && sed -n 's/^__version__ = "\(.*\)"/\1/p' hetlb/__init__.py)

for file in "hetlb-$version.tar.gz" "hetlb-$version-py3-none-any.whl"; do
  [ -f "$dist/$file" ] || { echo "$dist/$file: expected this file: make wheel builds it" >&2; exit 1; }
done
grep -q "^version: $version$" "$here/helm/hetlb/Chart.yaml" || { echo "Chart.yaml: version: expected $version" >&2; exit 1; }
grep -q "^## $version" "$here/../CHANGELOG.md" || { echo "CHANGELOG.md: expected a section $version" >&2; exit 1; }

for wheel in "$dist/hetlb-$version"-*.whl; do
  case $wheel in
    *-none-any.whl) ;;
    *-"$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"-*) ;;
    *) continue ;;  # built for another Python
  esac
  echo "== $(basename "$wheel")"
  "$python" -m venv --clear "$room/env"
  "$room/env/bin/pip" install -q --disable-pip-version-check "$wheel"
  cd "$room"
  PATH=$room/env/bin:$PATH
  hetlb --version
  hetlb demo --num-prompts 100 > demo.txt
  tail -n 3 demo.txt
  demo=$("$room/env/bin/python" -c 'import hetlb.tools.demo as d; print(d.__path__[0])')
  rm -f ./*.log
  running=()
  for name in fast slow; do
    hetlb engine --profile "$demo/$name.yaml" --served-model-name m --port 0 > "$name.log" 2>&1 &
    running+=($!)
  done
  urls=()
  for name in fast slow; do
    until grep -q 'engine ready on' "$name.log"; do sleep 0.1; done
    urls+=("$(sed -n 's/.*engine ready on //p' "$name.log")")
  done
  hetlb init "${urls[@]}" | sed 's/port: 8080/port: 0/; s/port: 8081/port: 0/' > fleet.yaml
  hetlb serve --config fleet.yaml --check
  hetlb serve --config fleet.yaml > serve.log 2>&1 &
  running+=($!)
  until grep -q 'hetlb ready on' serve.log; do sleep 0.1; done
  proxy=$(sed -n 's/.*hetlb ready on \([^ ]*\) .*/\1/p' serve.log)
  admin=$(sed -n 's/.*(admin \([^)]*\)).*/\1/p' serve.log)
  hetlb doctor --config fleet.yaml | tail -n 3
  hetlb bench --url "$proxy" --trace "$demo/trace.csv" --request-rate 20 --num-prompts 40 --json > bench.json
  grep -q '"completed": 40' bench.json
  hetlb status --admin "$admin"
  kill "${running[@]}"
  wait
done
echo "release $version: every wheel installs, demonstrates, serves, measures and checks itself"
