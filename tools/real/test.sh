#!/usr/bin/env bash
# make test-real: the contract suite and tests/real with SGLang and its router, on a CPU, and with a real Slurm.
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
mkdir -p build

began=$SECONDS
if ! settings=$(tools/real/prepare.sh); then
  case ",${REQUIRE:-}," in
  *,engine,*) echo 'error: REQUIRE names engine, and the environment with SGLang could not be made' >&2 && exit 1 ;;
  esac
  echo 'skipped: the environment with SGLang could not be made (above); REQUIRE=engine makes this a failure' >&2
  exit 0
fi
eval "$settings"
tools/slurm.sh build/slurm-apt.log || true # the tests that need it say so
echo "real engine: $RELAX_TEST_SGLANG_PYTHON (all there after $((SECONDS - began)) s)"
# In the order of the files, so that engines that tests share are ended before the next file starts its own.
# shellcheck disable=SC2086
exec .venv/bin/python -m pytest -q -p tests.harness.engine_meter -p no:randomly --durations=8 tests/contract tests/real ${PYTEST_ARGS:-}
