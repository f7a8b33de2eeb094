#!/usr/bin/env bash
# make test-slurm-24.11: the launcher suite on Debian 13's Slurm (24.11), whose het steps differ from 22.05's.
#
# The packages live in a folder of their own (debootstrap, about two minutes, kept in ~/.cache/relax-slurm), and the tests
# run in it with this checkout and its Python mounted at their usual places. Nothing of this machine is changed, and the
# mounts end with the tests. Needs root, debootstrap and the network.
#
#   TESTS="..."                what pytest runs (default: harness, launch, the wrong bindings, the parsers' recordings)
#   PYTEST_ARGS="-k decoupled" more words for pytest
#   SLURM_ROOT=/path           where the folder is
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null
here=$PWD
root=${SLURM_ROOT:-$HOME/.cache/relax-slurm/slurm-24.11}
packages=slurm-wlm,munge,iproute2,ca-certificates,libssl3t64,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,libreadline8t64,libncursesw6,libuuid1,libexpat1
tests=${TESTS:-tests/harness tests/integration/test_launch.py tests/integration/test_slurm_room.py tests/integration/test_wrong_binding.py tests/integration/test_borrowed.py}

say() { echo "slurm-24.11: $*" >&2; }
[[ $(id -u) == 0 ]] || { say "wants root, for debootstrap and chroot"; exit 2; }

if [[ ! -e $root/.complete ]]; then
  if ! command -v debootstrap >/dev/null; then
    say "installing debootstrap"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends debootstrap; } \
      >/dev/null </dev/null
  fi
  say "making $root (about two minutes)"
  rm -rf "$root.part"
  mkdir -p "$(dirname "$root")"
  if ! debootstrap --variant=minbase --include="$packages" trixie "$root.part" "${MIRROR:-http://deb.debian.org/debian}" \
    >"$root.log" 2>&1; then
    tail -n 5 "$root.log" >&2
    say "debootstrap failed, see $root.log"
    exit 1
  fi
  rm -rf "$root.part/var/cache/apt/archives" "$root"
  touch "$root.part/.complete"
  mv "$root.part" "$root"
fi

tools/env.sh dev
base=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
short=$(.venv/bin/python -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
if [[ $base == /usr ]]; then # the distribution's own Python: only its files, next to Debian 13's
  binds="/usr/bin/$short /usr/lib/$short"
else
  binds=$base
fi

# A mount namespace of our own: whatever happens, the mounts end with it.
export here root binds tests
exec unshare --mount --propagation private bash -euo pipefail -c '
for path in /proc /sys /dev /tmp "$here" $binds /etc/hosts /etc/resolv.conf /etc/passwd /etc/group; do
  if [[ -d $path ]]; then mkdir -p "$root$path"; else mkdir -p "$(dirname "$root$path")"; touch "$root$path"; fi
  mount --rbind "$path" "$root$path"
done
mkdir -p "$root$HOME" "$root/run/munge"
exec chroot "$root" bash -euo pipefail -c '"'"'
  cd "$1"; shift
  sinfo --version 2>/dev/null || slurmd -V
  export PYTHONNOUSERSITE=1 REQUIRE=slurm PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  exec .venv/bin/python -m pytest -q -m slurm -p no:cacheprovider "$@"
'"'"' chroot "$here" $tests ${PYTEST_ARGS:-}
'
