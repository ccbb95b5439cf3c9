#!/bin/bash
# A real Chromium for the tests of pages: Debian's, since Playwright's own download needs the
# network of its makers.
#
#   tests/browser/chromium.sh install    install it where possible; always exits 0
#   tests/browser/chromium.sh path       print where it is; fails where there is none
set -u -o pipefail

say() { echo "chromium.sh: $*" >&2; }

find_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends \
    -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}

install_chromium() {
  find_chromium >/dev/null && return 0
  if ! command -v apt-get >/dev/null; then
    say "Chromium is not installed, and without apt-get it cannot be from here"
    return 1
  fi
  if [ "$(id -u)" != 0 ]; then
    say "Chromium is missing"
    say "  fix: run 'tests/browser/chromium.sh install' as root"
    return 1
  fi
  say "installing chromium"
  local log
  log=$(mktemp)
  # fonts: without any, text has no width.
  if ! { apt_get update && apt_get install chromium fonts-dejavu-core; } >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    rm -f "$log"
    say "apt-get could not install Chromium"
    return 1
  fi
  rm -f "$log"
}

case ${1:-} in
  install) install_chromium || say "tests that need it are skipped" ;;
  path) find_chromium || exit 1 ;;
  *)
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
    ;;
esac
exit 0
