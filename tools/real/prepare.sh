#!/usr/bin/env bash
# Everything the tests with SGLang need, made or found made; prints shell assignments that name it:
#
#   settings=$(tools/real/prepare.sh) && eval "$settings"
#
# That is the environment of tools/real/build.sh, and the system libraries that mooncake links to; without these
# RELAX_TEST_NO_MOONCAKE says why. PYTHON names the interpreter to start from, without it the one of .venv.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." >/dev/null

libraries=(libibverbs1 librdmacm1 libnuma1 ibverbs-providers libcurl4)
base=$(.venv/bin/python -c 'import sys; print(sys._base_executable)')
home=$(PYTHON=${PYTHON:-$base} tools/real/build.sh)

mooncake() { "$home/venv/bin/python" -c 'import mooncake.engine' >/dev/null 2>&1; }
without=''
if ! mooncake; then
  echo "installing the libraries of mooncake from Debian's packages" >&2
  mkdir -p build
  said=$(tools/debian.sh build/mooncake-apt.log "${libraries[@]}") || true
  mooncake || without="mooncake does not load: ${said:-$("$home/venv/bin/python" -c 'import mooncake.engine' 2>&1 | tail -n 1)}"
fi
# Beside it, for the tests that put rows into a real TransferQueue; without it they say so.
queue=$(PYTHON=${PYTHON:-$base} tools/real/transfer_queue.sh) || queue=''

echo "# $home"
.venv/bin/python tools/real/settings.py "$home"
printf 'export RELAX_TEST_NO_MOONCAKE=%q\n' "$without"
[[ -z $queue ]] || printf 'export RELAX_TEST_TRANSFERQUEUE_PYTHON=%q\n' "$queue"
