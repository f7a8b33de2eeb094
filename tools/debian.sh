#!/usr/bin/env bash
# Installs Debian packages where this may: tools/debian.sh LOG PACKAGE…
#
# Starts no daemon of theirs. Exit code 1 with the reason in one line on stdout when it cannot (not root, no apt-get) or
# when apt-get fails; what apt-get said is in LOG.
set -uo pipefail

log=$1
shift
if [[ $(id -u) != 0 ]]; then
  echo "not root, so not installed here (as root: apt-get install $*)"
  exit 1
fi
if ! command -v apt-get >/dev/null 2>&1; then
  echo "no apt-get here to install $* with"
  exit 1
fi

policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then # Debian's own switch against starting daemons while packages are installed
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT # also when interrupted
  printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
fi
wait=(-o DPkg::Lock::Timeout=120)
{
  apt-get update &&
    DEBIAN_FRONTEND=noninteractive apt-get "${wait[@]}" install -y --no-install-recommends "$@"
} >"$log" 2>&1 </dev/null || {
  echo "apt-get install $* failed ($(grep -E '^E:' "$log" | tail -n 1)), see $log"
  exit 1
}
