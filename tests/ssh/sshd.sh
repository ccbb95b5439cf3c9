#!/bin/bash
# An ssh server for the tests of runs on hosts: OpenSSH, one in each of two network namespaces.
#
#   tests/ssh/sshd.sh install    install it where possible; always exits 0
set -u -o pipefail

say() { echo "sshd.sh: $*" >&2; }

install_sshd() {
  [ -x /usr/sbin/sshd ] && command -v ssh >/dev/null && return 0
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "sshd is missing"
    say "  fix: install it (Debian, Ubuntu: apt-get install openssh-server openssh-client rsync)"
    return 1
  fi
  say "installing openssh-server"
  { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
      -o DPkg::Lock::Timeout=300 install openssh-server openssh-client rsync; } </dev/null >/dev/null 2>&1 ||
    { say "apt-get could not install OpenSSH"; return 1; }
}

case ${1:-} in
  install) install_sshd || say "tests that need it are skipped" ;;
  *)
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
    ;;
esac
exit 0
