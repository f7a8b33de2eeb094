#!/usr/bin/env bash
# Sees to it that the programs of Slurm are there, which the tests start themselves: tools/slurm.sh LOG
#
# Silent when they are; otherwise they come from Debian's packages, and exit code 1 says in one line why not.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

missing() {
  .venv/bin/python -c 'from tests.harness.slurm_cluster import missing_programs; print(*missing_programs())'
}

left=$(missing) || { echo 'the harness does not import'; exit 1; }
[[ -n $left ]] || exit 0
echo "installing Slurm from Debian's packages" >&2
said=$(tools/debian.sh "$1" slurm-wlm munge iproute2) || { echo "not found: $left; $said"; exit 1; }
left=$(missing)
[[ -z $left ]] || { echo "not found after apt-get install: $left"; exit 1; }
