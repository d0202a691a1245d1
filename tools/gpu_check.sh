#!/bin/sh
# What gruckpt says of a GPU, checked on one: at most ten minutes; see gpu_check.py for the parts and options.
exec "${PYTHON:-python}" "$(dirname "$0")/gpu_check.py" "$@"
