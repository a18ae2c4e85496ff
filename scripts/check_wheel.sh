#!/bin/sh
# Builds the wheel, installs it into an environment outside the repository and runs the demo there.
# usage: scripts/check_wheel.sh PYTHON [FOLDER]; PYTHON's packages (torch among them) are used, its Gambit is not.
set -eu
python=$1
work=${2:-$(mktemp -d)}
root=$(cd "$(dirname "$0")/.." && pwd)
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work" "$root"
"$python" -m venv "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$site/environment.pth"  # behind the environment's own packages: no second torch is downloaded
"$work/venv/bin/pip" install --quiet --no-deps --ignore-installed "$work"/gambit_search-*.whl

cd "$work" # nothing of the repository is in reach
unset PYTHONPATH
"$work/venv/bin/python" -c '
import gambit, sys
assert gambit.__file__.startswith(sys.prefix), gambit.__file__
print("installed:", gambit.__version__)'
"$work/venv/bin/gambit" demo --seed 1
"$work/venv/bin/python" -m zipfile --list "$work"/gambit_search-*.whl
