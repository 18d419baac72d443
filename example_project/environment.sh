# Sourced by ./tests/run and ./example_project/demo, from the root of the checkout:
#
#     source example_project/environment.sh
#     prepare_environment example,test
#     exec "$python" -m pytest
#
# prepare_environment EXTRAS sets $python to an interpreter that has this checkout installed with those
# extras. It takes the active virtual environment, or else .venv, which it makes with the first
# Python >= 3.11 it finds. Nothing is installed twice: a stamp in the environment tells what is there.
# It prints only what takes time and what goes wrong; when it cannot succeed it says why and exits.

prepare_environment() {
    local extras=$1 venv=${VIRTUAL_ENV:-$PWD/.venv} stamp wanted log
    python=$venv/bin/python
    export PATH # bash invents one in an empty environment, for itself alone

    # Two first runs at the same time would install over each other. (macOS has no flock: there, don't.)
    if command -v flock >/dev/null && exec 9<"$PWD"; then flock 9; fi

    if ! can_import "$python" pip; then
        if [ -n "${VIRTUAL_ENV:-}" ]; then
            give_up "The active virtual environment, $VIRTUAL_ENV, has no Python >= 3.11 with pip." \
                "Deactivate it, and .venv is used instead."
        fi
        make_environment "$venv"
    fi

    stamp=$venv/django-pgjobs-$extras
    wanted=$("$python" - <<'PYTHON'
import hashlib, os, sys

with open("pyproject.toml", "rb") as file:
    print(sys.version, os.getcwd(), hashlib.sha256(file.read()).hexdigest())
PYTHON
    )
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing django-pgjobs[$extras] into $venv ..." >&2
        log=$(mktemp)
        if ! "$python" -m pip install --disable-pip-version-check --editable ".[$extras]" >"$log" 2>&1; then
            cat "$log" >&2
            rm -f "$log"
            give_up "pip could not install django-pgjobs[$extras]; its output is above."
        fi
        rm -f "$log"
        printf '%s\n' "$wanted" >"$stamp"
    fi
    exec 9<&-
}

make_environment() {
    local candidate
    for candidate in python3 python3.14 python3.13 python3.12 python3.11; do
        if can_import "$candidate" ensurepip, venv; then
            "$candidate" -m venv --clear "$1" ||
                give_up "$1 could not be made. Activate a virtual environment of your own and try again."
            return
        fi
    done
    give_up "No Python >= 3.11 with its venv module was found as python3 or python3.14 to python3.11." \
        "Install one (on Debian and Ubuntu: python3 and python3-venv) and try again."
}

# can_import PYTHON MODULES: is it Python >= 3.11, with these?
can_import() {
    "$1" -c "import sys, ${*:2}; sys.exit(sys.version_info < (3, 11))" >/dev/null 2>&1
}

give_up() {
    echo "$*" >&2
    exit 1
}
