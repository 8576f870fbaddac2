#!/usr/bin/env bash
# Installs the headless Chromium that tests/router/test_dashboard_page.py drives, where none is found and this may do so:
# on Debian and its like, as root. Elsewhere it says what to do, and those tests are skipped.
set -euo pipefail

for known in chromium-headless-shell chromium; do
  command -v "$known" >/dev/null && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "setup: no Chromium here, so the dashboard's page is not tested; install chromium or chromium-headless-shell"
  exit 0
fi
echo "setup: installing a headless Chromium for the dashboard's tests"
export DEBIAN_FRONTEND=noninteractive
for package in chromium-headless-shell chromium; do
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$package" fonts-dejavu-core; } >/dev/null 2>&1 && exit 0
done
echo "setup: Chromium could not be installed, so the dashboard's page is not tested"
