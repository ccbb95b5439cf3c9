#!/bin/bash
# Installs what the tests need besides Python, where that is possible; always exits 0.
#
#   tests/install.sh [slurm | tmux | ssh | chromium]...    by default all of them
set -u -o pipefail

say() { echo "install.sh: $*" >&2; }

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends \
    -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}

install() { # NAME PACKAGES... : unless one of the programs in $programs is here
  local name=$1 program log
  shift
  for program in $programs; do command -v "$program" >/dev/null && return; done
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "$name is missing, and tests that need it are skipped"
    say "  fix: install it (Debian, Ubuntu: apt-get install $*)"
    return
  fi
  say "installing $name"
  log=$(mktemp)
  { apt_get update && apt_get install "$@"; } >"$log" 2>&1 ||
    { tail -n 5 "$log" >&2; say "$name could not be installed: tests that need it are skipped"; }
  rm -f "$log"
}

[ $# -gt 0 ] || set -- slurm tmux ssh chromium
for name; do
  case $name in
    slurm) "$(dirname "$0")/slurm/cluster.sh" install ;;
    tmux) programs=tmux install tmux tmux ;;
    ssh)
      programs=/usr/sbin/sshd install sshd openssh-server openssh-client
      programs=rsync install rsync rsync
      ;;
    chromium) # Debian's: Playwright's own needs its makers' network. Without fonts text has no width.
      programs="chromium chromium-browser google-chrome" \
        install Chromium chromium fonts-dejavu-core
      ;;
    *) say "nothing is known about $name" ;;
  esac
done
exit 0
