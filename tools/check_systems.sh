#!/bin/sh
# The core on other systems, as far as Linux can check it: its tests on Windows under Wine, its wheel for Windows, and
# what compiles and links for macOS.
# Usage: tools/check_systems.sh PYTHON BUILD_DIRECTORY, with numpy, build, setuptools, abi3info and ziglang in PYTHON.
set -eu
python=$(realpath -s "$1")
mkdir -p "$2"
build=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."
jobs=$(nproc 2>/dev/null || echo 2)
end() { WINEPREFIX=$build/wine wineserver -k 2>/dev/null || true; }
trap end EXIT # Wine's services outlive the program

make --silent --jobs "$jobs" -C csrc BUILD="$build" PYTHON="$python" build-windows macos
make --silent -C csrc BUILD="$build" PYTHON="$python" windows
# The flags of a release, but with few inlined kernels, which compile in a tenth of the time.
SELFATTN_WERROR=1 SELFATTN_QUICK_BUILD=1 "$python" tools/build_wheels.py --windows "$build/windows-wheel" \
    >"$build/windows-wheel.log" || { cat "$build/windows-wheel.log"; exit 1; }
"$python" tools/check_wheel.py "$build"/windows-wheel/selfattn-*-win_amd64.whl
echo "other systems: all checks passed"
