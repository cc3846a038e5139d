#!/bin/sh
# Sets up the course in this folder and opens it: sh start.sh (see START.md).
cd "$(dirname "$0")" || exit 1
if [ ! -f setup/start.py ]; then
  echo "The folder setup is not beside start.sh: unpack the whole zip, then start again." >&2
  exit 1
fi
for python in ${PYTHON:+"$PYTHON"} python3.12 python3.11 python3.13 python3 python; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    exec "$python" setup/start.py "$@"
  fi
  if [ "$python" = "${PYTHON:-}" ]; then
    echo "PYTHON=$PYTHON does not start a Python 3.11 or 3.12: name another, or leave PYTHON out." >&2
    exit 1
  fi
done
found=
if command -v python3 >/dev/null 2>&1; then
  found=$(python3 --version 2>&1 | head -n 1)
fi
echo "kvlab needs Python 3.11 or 3.12; found: ${found:-none}. Install 3.12 from" \
  "https://www.python.org/downloads/, or name one: PYTHON=/path/to/python3.12 sh start.sh" >&2
exit 1
