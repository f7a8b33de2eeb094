#!/usr/bin/env bash
# make quickstart: makes the environment (what a run needs, nothing else) and hands over to tools/quickstart.py.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

case ${ENGINE:-sim} in
sim) ;;
sglang) echo "making the environment with SGLang once (3.4 GB, several minutes); it stays outside the checkout" >&2 ;;
*)
  echo "error: ENGINE=$ENGINE is no engine, wanted sim or sglang; leave ENGINE out for sim" >&2
  exit 2
  ;;
esac

tools/env.sh run
if [ "${ENGINE:-sim}" = sglang ]; then
  base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
  home=$(PYTHON=${PYTHON:-$base} tools/real/build.sh)
  exec .venv/bin/python -I tools/quickstart.py --real "$home"
fi
exec .venv/bin/python -I tools/quickstart.py
