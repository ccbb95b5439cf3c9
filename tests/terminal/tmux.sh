#!/bin/bash
# A real terminal for the tests of live views: tmux, whose screen can be read.
#
#   tests/terminal/tmux.sh install    install it where possible; always exits 0
set -u -o pipefail

say() { echo "tmux.sh: $*" >&2; }

install_tmux() {
  command -v tmux >/dev/null && return 0
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "tmux is missing"
    say "  fix: install it (Debian, Ubuntu: apt-get install tmux)"
    return 1
  fi
  say "installing tmux"
  { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 update &&
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
      -o DPkg::Lock::Timeout=300 install tmux; } </dev/null >/dev/null 2>&1 ||
    { say "apt-get could not install tmux"; return 1; }
}

case ${1:-} in
  install) install_tmux || say "tests that need it are skipped" ;;
  *)
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
    ;;
esac
exit 0
