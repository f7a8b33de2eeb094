#!/usr/bin/env bash
# make quickstart: makes the environment (what a run needs, nothing else) and hands over to tools/quickstart.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

case ${ENGINE:-sim} in
sim) ;;
sglang)
  echo "error: make quickstart ENGINE=sglang is not built yet: running the program sglang on this machine arrives with" \
    "row E2 (real engines); leave ENGINE out for simulated ones" >&2
  exit 1
  ;;
*)
  echo "error: ENGINE=$ENGINE is no engine, wanted sim; leave ENGINE out" >&2
  exit 2
  ;;
esac

tools/env.sh run
exec .venv/bin/python -I tools/quickstart.py
