#!/usr/bin/env bash
# make test-real: the contract suite and tests/real with SGLang and its router, on a CPU.
#
#   REQUIRE=engine        where the environment cannot be built, fail instead of skipping
#   PYTEST_ARGS=...       more words for pytest
#   RELAX_TEST_RECORD=1   write tests/contract/golden anew from what SGLang answers
#
# docs/real-engine.md says what the stand-ins for a GPU leave unproven.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." >/dev/null

tools/env.sh dev
while IFS='=' read -r name _; do
  case $name in
  RELAX_TEST_*) ;;
  RELAX_* | SLURM_* | SLURMD_* | SBATCH_*) unset "$name" ;;
  esac
done < <(env)
unset PYTHONPATH PYTHONHOME PYTHONWARNINGS PYTEST_ADDOPTS

began=$SECONDS
base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
if ! home=$(PYTHON=${PYTHON:-$base} tools/real/build.sh); then
  case ",${REQUIRE:-}," in
  *,engine,*) echo 'error: REQUIRE names engine, and the environment with SGLang could not be built' >&2 && exit 1 ;;
  esac
  echo 'skipped: the environment with SGLang could not be built (above); REQUIRE=engine makes this a failure' >&2
  exit 0
fi
echo "real engine: $home (there after $((SECONDS - began)) s)"
eval "$(.venv/bin/python tools/real/settings.py "$home")"
# shellcheck disable=SC2086
exec .venv/bin/python -m pytest -q --durations=8 tests/contract tests/real ${PYTEST_ARGS:-}
