#!/usr/bin/env bash
# Makes the project's own environment in .venv, or finds it made: tools/env.sh run|dev
#
# `run` installs what a run needs, `dev` the tools of the checks as well. A stamp inside .venv remembers pyproject.toml,
# this folder and the Python, so that a second call costs nothing and a moved checkout is installed again.
# PYTHON names the interpreter to start from; without it the first of python3, python3.13, python3.12, python3.11 that
# is new enough is taken.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null

kind=${1:-run}
case $kind in
run) what=. ;;
dev) what='.[dev]' ;;
*)
  echo "error: tools/env.sh: unknown kind '$kind', wanted run or dev" >&2
  exit 2
  ;;
esac

fail() {
  echo "error: $1" >&2
  exit 1
}

# What a user has set up for other projects must not reach into this environment.
for name in ${!PYTHON@}; do
  [[ $name == PYTHON ]] || unset "$name"
done
unset PIP_TARGET PIP_PREFIX PIP_CONSTRAINT __PYVENV_LAUNCHER__ VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || echo 'missing'; }

base_python() {
  if [[ -n ${PYTHON:-} ]]; then
    new_enough "$PYTHON" || fail "PYTHON=$PYTHON is $(version_of "$PYTHON"), wanted Python 3.11 or newer; name another one"
    echo "$PYTHON"
    return
  fi
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer on the PATH (python3 is $(version_of python3)); install one, or use make PYTHON=/path/to/python3.11"
}

stamp_text() {
  .venv/bin/python -c '
import hashlib, os, pathlib, sys
text = pathlib.Path("pyproject.toml").read_bytes() + os.getcwd().encode() + sys.version.encode()
print(hashlib.sha256(text).hexdigest())'
}

# Two makes in one checkout would write one environment at the same time. The lock is on a file that is there anyway.
exec 9>>Makefile
if command -v flock >/dev/null 2>&1; then
  flock -n 9 || { echo "waiting for another make that prepares .venv" >&2; flock 9; }
fi

if [[ -e .venv ]] && ! { new_enough .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; }; then
  echo "making .venv again: its Python does not run, or is older than 3.11" >&2
  rm -rf .venv
fi
if [[ ! -e .venv ]]; then
  python=$(base_python)
  "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python ($(version_of "$python")) has no venv module, which makes .venv; install it (Debian: apt-get install python3-venv)"
  "$python" -m venv .venv >/dev/null || { rm -rf .venv; fail "$python -m venv .venv failed; see the lines above"; }
fi

wanted=$(stamp_text)
for stamp in ".venv/.made-$kind" .venv/.made-dev; do
  if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    exit 0
  fi
done

echo "installing into .venv (pip install -e '$what')" >&2
log=.venv/pip.log
start=$SECONDS
if ! .venv/bin/python -m pip install --quiet -e "$what" >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  fail "pip could not install relax-slurm into .venv; the whole output is in $PWD/$log"
fi
echo "$wanted" >".venv/.made-$kind"
echo "installed in $((SECONDS - start)) s" >&2
