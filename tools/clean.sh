#!/usr/bin/env bash
# make clean: removes what make made, after the quickstart's runs have ended.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
if [[ -d .quickstart && -x .venv/bin/python ]]; then
  .venv/bin/python tools/quickstart.py --stop
fi
rm -rf .quickstart .venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
