#!/usr/bin/env bash
# make bench: every script of tests/bench, one after the other; each prints one JSON document.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
tools/env.sh dev
for script in tests/bench/*_bench.py; do
  [[ -e $script ]] || { echo "error: there is no benchmark in tests/bench" >&2; exit 1; }
  echo "== $script" >&2
  .venv/bin/python "$script"
done
