#!/usr/bin/env bash
# Makes a Python with TransferQueue 0.1.11 (and Ray, and the torch of tools/real/build.sh), or finds it made, and prints
# its path: about 300 MB beside the SGLang environment. tests/real/test_transfer_queue.py runs in it:
#
#   RELAX_TEST_TRANSFERQUEUE_PYTHON=$(tools/real/transfer_queue.sh) python -m pytest tests/real/test_transfer_queue.py
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

real=$(./build.sh)
home=$real/transfer-queue
if [[ ! -f $home/made.txt ]]; then
  exec 9>"$real/transfer-queue.lock"
  flock 9
  if [[ ! -f $home/made.txt ]]; then
    rm -rf -- "$home"
    "$real/venv/bin/python" -m venv "$home" >&2
    site=$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$real/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/torch-of-the-engine.pth"
    "$home/bin/python" -m pip install -q 'ray[default]' tensordict TransferQueue==0.1.11 httptools msgpack msgspec pydantic \
      >"$home/pip.log" 2>&1 || { tail -n 5 "$home/pip.log" >&2 && exit 1; }
    date >"$home/made.txt"
  fi
fi
echo "$home/bin/python"
