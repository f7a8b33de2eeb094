#!/usr/bin/env bash
# make test: every check, one lane after the other, each with its time, and a summary at the end.
#
#   LANES="lint unit"   picks some of: lint unit chaos contract integration
#   REQUIRE=slurm       what would be skipped for want of Slurm is a failure (a list with commas; `engine` for SGLang)
#   PYTEST_ARGS=...     more words for every pytest
#
# Slurm comes from Debian's packages where this may install them (root, apt-get); no daemon of theirs is started.
# Exit code 1 when a lane failed. What pytest printed is in build/test.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

all_lanes='lint unit chaos contract integration'
lanes=${LANES:-$all_lanes}
require=" $(tr ',' ' ' <<<"${REQUIRE:-}") "
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

missing_slurm() {
  $python -c 'from tests.harness.slurm_cluster import missing_programs; print(*missing_programs())'
}

install_slurm() {
  local policy=/usr/sbin/policy-rc.d ours=0 code=0
  if [[ ! -e $policy ]]; then # Debian's own switch against starting daemons while packages are installed
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT # also when interrupted
    printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy" && ours=1
  fi
  {
    apt-get update &&
      DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends slurm-wlm munge iproute2
  } >"$results/apt.log" 2>&1 </dev/null || code=$?
  if [[ $ours == 1 ]]; then
    rm -f "$policy"
    trap - EXIT
  fi
  return "$code"
}

slurm_reason=''
prepare_slurm() {
  local missing
  missing=$(missing_slurm) || { slurm_reason='the harness does not import'; return; }
  [[ -n $missing ]] || return
  if [[ $(id -u) != 0 ]]; then
    slurm_reason="not found: $missing; not root, so not installed here (as root: apt-get install slurm-wlm munge)"
  elif ! command -v apt-get >/dev/null 2>&1; then
    slurm_reason="not found: $missing; no apt-get here to install it with"
  else
    echo "installing Slurm from Debian's packages"
    if install_slurm; then
      missing=$(missing_slurm)
      [[ -z $missing ]] || slurm_reason="not found after apt-get install: $missing"
    else
      tail -n 5 "$results/apt.log" >&2
      slurm_reason="apt-get install failed, see $results/apt.log"
    fi
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
for lane in $lanes; do
  case $lane in
  chaos | contract | integration)
    if ! has_tests "$lane"; then
      note "$lane" none 0 "no tests in tests/$lane"
      continue
    fi
    ;;
  esac
  if [[ $lane == integration ]]; then
    prepare_slurm
    if [[ -n $slurm_reason ]]; then
      if [[ $require == *' slurm '* ]]; then
        failed=1
        note slurm FAILED 0 "required, but $slurm_reason"
      else
        note slurm skipped 0 "$slurm_reason; REQUIRE=slurm makes this a failure"
      fi
    fi
  fi
  run_lane "$lane"
done

{
  echo
  for lane in $lanes; do # what pytest itself said last, so that the end of a log tells everything
    [[ $lane == lint || ! -f $results/$lane.log ]] || tail -n 1 "$results/$lane.log"
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
