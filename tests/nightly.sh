#!/usr/bin/env bash
# The tests that are too slow for every change: whole runs killed many times, steps compiled for each kind of TPU.
set -eu
cd "$(dirname "$0")/.."
exec bash launch.sh test -m slow tests "$@"
