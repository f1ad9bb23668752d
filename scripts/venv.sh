# Sourced by the other scripts: makes .venv when it is missing, brings it up to date when it is not.
# What else was installed there stays: a .venv is never emptied, other programs may be using it now.
# Needs python3 (3.10 to 3.13) with its venv module; PYTHON=/path/to/python3 chooses another one.

venv_stamp() { cat pyproject.toml constraints.txt | cksum; }

make_venv() {
  local python=${PYTHON:-python3}
  if ! "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'; then
    echo "torchrelay needs python 3.10 to 3.13; set PYTHON=/path/to/one" >&2
    return 2
  fi
  echo "making .venv with $("$python" --version) (torch is large: this may take some minutes)" >&2
  "$python" -m venv .venv
}

fill_venv() {
  .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
  venv_stamp > .venv/stamp
}

if [ ! -x .venv/bin/python ]; then
  make_venv
fi
venv_is_filled() { [ "$(cat .venv/stamp 2>/dev/null)" = "$(venv_stamp)" ]; }
if ! venv_is_filled; then
  ( flock 9; venv_is_filled || fill_venv ) 9> .venv/lock  # two scripts that begin together do it once
fi
PATH="$PWD/.venv/bin:$PATH"
export PATH
# torch asks the name service about each connection of its store: an answer that is lost costs 5 s otherwise.
export RES_OPTIONS="${RES_OPTIONS:-timeout:1 attempts:5}"
