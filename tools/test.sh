#!/usr/bin/env bash
# make test: every check, one lane after the other, each with its time, and a summary at the end.
#
#   LANES="lint unit"   picks some of: lint unit chaos contract integration real
#   REQUIRE=slurm       what would be skipped for want of Slurm is a failure (a list with commas)
#   REQUIRE=engine      SGLang itself takes part: it is installed, the contract is asked of it too, the lane `real` runs,
#                       and no test may be skipped (unless for want of Slurm, which is a word of its own)
#   PYTEST_ARGS=...     more words for every pytest
#
# Slurm comes from Debian's packages where this may install them (root, apt-get); no daemon of theirs is started.
# Exit code 1 when a lane failed. What pytest printed is in build/test.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

all_lanes='lint unit chaos contract integration real'
require=" $(tr ',' ' ' <<<"${REQUIRE:-}") "
with_engine=0
[[ $require == *' engine '* || " ${LANES:-} " == *' real '* ]] && with_engine=1
lanes=${LANES:-$all_lanes}
[[ -n ${LANES:-} || $with_engine == 1 ]] || lanes='lint unit chaos contract integration'
results=build/test
declare -a summary=()
failed=0

for lane in $lanes; do
  if [[ " $all_lanes " != *" $lane "* ]]; then
    echo "error: LANES names '$lane', wanted some of: $all_lanes" >&2
    exit 2
  fi
done
for need in $require; do
  if [[ $need != slurm && $need != engine ]]; then
    echo "error: REQUIRE names '$need', wanted slurm or engine" >&2
    exit 2
  fi
done

# Settings for other runs and other programs must not reach the tests.
while IFS='=' read -r name _; do
  case $name in RELAX_* | SLURM_* | SLURMD_* | SBATCH_* | PYTHON?* | PYTEST_ADDOPTS) unset "$name" ;; esac
done < <(env)
export REQUIRE=${REQUIRE:-} PYTHONNOUSERSITE=1
mkdir -p "$results"
rm -f "$results"/*

tools/env.sh dev || exit 1
python=.venv/bin/python

# --- Slurm ------------------------------------------------------------------------------------------------------

slurm_looked=''
prepare_slurm() { # once
  local slurm_reason
  [[ -z $slurm_looked ]] || return
  slurm_looked=1
  slurm_reason=$(tools/slurm.sh "$results/apt.log") || {
    if [[ $require == *' slurm '* ]]; then
      failed=1
      note slurm FAILED 0 "required, but $slurm_reason"
    else
      note slurm skipped 0 "$slurm_reason; REQUIRE=slurm makes this a failure"
    fi
  }
}

# --- SGLang -----------------------------------------------------------------------------------------------------

prepare_engine() { # once; what pip or apt-get said is in the caches' log and in build/
  local start=$SECONDS settings
  printf '\n=== engine\n'
  if settings=$(tools/real/prepare.sh); then
    eval "$settings"
    note engine ok $((SECONDS - start)) "SGLang is there: ${RELAX_TEST_SGLANG_PYTHON%/venv/*}"
  else
    failed=1
    note engine FAILED $((SECONDS - start)) 'SGLang could not be installed, see above; the lanes that need it fail'
  fi
}

# --- lanes ------------------------------------------------------------------------------------------------------

note() { # lane, verdict, seconds, words
  summary+=("$(printf '%-12s %-7s %4ss  %s' "$1" "$2" "$3" "$4")")
}

lint() { # all of them, so that one run shows everything; the last line says which failed
  local bad=()
  $python -m ruff check . || bad+=('ruff check')
  $python -m ruff format --check . || bad+=('ruff format')
  $python -m mypy || bad+=(mypy)
  if [[ ${#bad[@]} -gt 0 ]]; then
    printf 'failed: %s\n' "$(IFS=,; echo "${bad[*]}")"
    return 1
  fi
  echo 'ruff check, ruff format, mypy'
}

run_pytest() { # lane, words for pytest
  local lane=$1
  shift
  # shellcheck disable=SC2086
  $python -m pytest "$@" ${PYTEST_ARGS:-} 2>&1 | tee "$results/$lane.log"
}

has_tests() {
  compgen -G "tests/$1/test_*.py" >/dev/null || compgen -G "tests/$1/**/test_*.py" >/dev/null
}

run_lane() {
  local lane=$1 start=$SECONDS code=0 words
  printf '\n=== %s\n' "$lane"
  case $lane in
  lint) lint 2>&1 | tee "$results/lint.log" || code=$? ;;
  unit) run_pytest unit -n 2 -q tests/unit || code=$? ;;
  chaos) run_pytest chaos -n 2 -q tests/chaos || code=$? ;;
  contract) run_pytest contract -q tests/contract || code=$? ;;
  integration) run_pytest integration -n 2 --dist loadfile -q tests/harness tests/integration || code=$? ;;
  real) run_pytest real -p tests.harness.engine_meter -p no:randomly --durations=8 -q tests/real || code=$? ;;
  esac
  if [[ $lane == lint ]]; then
    words=$(tail -n 1 "$results/lint.log")
  else
    words=$(grep -E '(passed|failed|skipped|error|no tests ran).* in [0-9.:]+' "$results/$lane.log" | tail -n 1)
  fi
  words=${words//=/}
  if [[ $lane == chaos ]]; then # how many schedules that were
    words="$(grep '^chaos: ' "$results/chaos.log" | tail -n 1 | sed 's/^chaos: //');$words"
  fi
  if [[ $code == 0 ]]; then
    note "$lane" ok $((SECONDS - start)) "${words# }"
  else
    failed=1
    note "$lane" FAILED $((SECONDS - start)) "${words:-it ended with code $code}"
  fi
}

began=$SECONDS
# A test makes a certificate with it; where it is not to be had, that test says so.
command -v openssl >/dev/null 2>&1 || tools/debian.sh "$results/openssl-apt.log" openssl || true
[[ $with_engine == 0 ]] || prepare_engine
for lane in $lanes; do
  if [[ $lane != lint ]] && ! has_tests "$lane"; then
    note "$lane" none 0 "no tests in tests/$lane"
    continue
  fi
  case $lane in integration | real) prepare_slurm ;; esac
  run_lane "$lane"
done
if [[ $with_engine == 0 && -z ${LANES:-} ]]; then
  note real skipped 0 'SGLang itself was not asked; REQUIRE=engine installs it (3.5 GB) and asks it, so does make test-real'
fi

{
  echo
  for lane in $lanes; do # what pytest itself said last, so that the end of a log tells everything
    [[ $lane == lint || ! -f $results/$lane.log ]] || tail -n 1 "$results/$lane.log"
  done
  for lane in $lanes; do # why something was skipped, and what the engines cost
    [[ ! -f $results/$lane.log ]] || grep -hE '^(SKIPPED \[|engines: |contract checks )' "$results/$lane.log" | sed "s/^/$lane: /"
  done
  echo "--- make test: $((SECONDS - began)) s"
  printf '%s\n' "${summary[@]}"
  if [[ $failed == 0 ]]; then
    echo 'all lanes ok'
  else
    echo 'FAILED'
  fi
} | tee "$results/summary.txt"
exit "$failed"
