#!/bin/sh
# Python threads under ThreadSanitizer: builds a copy of the sources, has tests/support/races.py and that of pretrained models compute
# in many threads at once, and shows first that a race planted there is found.
# Usage: tools/check_threads.sh PYTHON DIRECTORY [ROUNDS]; PYTHON has the build requirements; GCC. A free-threaded Python must itself be
# built with --with-thread-sanitizer: what orders its threads would not be seen. With another one the script runs, without a sanitizer.
set -eu
python=$(cd "$(dirname "$(command -v "$1")")" && pwd)/$(basename "$1") # a link in an environment: not resolved
mkdir -p "$2"
directory=$(cd "$2" && pwd)
rounds=${3:-1}
cd "$(dirname "$0")/.."
rm -rf "$directory/sources"
mkdir "$directory/sources"
git ls-files -z | tar -c --null -T - | tar -x -C "$directory/sources"
cd "$directory/sources"

# Random addresses may lie where the sanitizer's own memory is to be.
fixed=$(setarch -R true 2>/dev/null && echo "setarch -R" || true)
# The children of fork() compute as well. Sizes that are refused are beyond any memory.
export TSAN_OPTIONS="die_after_fork=0 history_size=4 exitcode=66 allocator_may_return_null=1 suppressions=$PWD/tools/check_threads.supp"
runtime=
run() {
    LD_PRELOAD=$runtime PYTHONPATH="$directory/sources:$directory/sources/models${PYTHONPATH:+:$PYTHONPATH}" \
        $fixed "$python" -W ignore "$@"
}
run_both() {
    run tests/support/races.py "$@"
    run models/tests/support/model_races.py "$@"
}
case $("$python" -c 'import sysconfig
print(sysconfig.get_config_var("PY_CFLAGS"), "free" * bool(sysconfig.get_config_var("Py_GIL_DISABLED")))') in
    *-fsanitize=thread*)
        export SELFATTN_ISA=generic # Clang's, as a rule, which watches no access of more than 16 bytes
        ;;
    *free)
        echo "$1 is free-threaded and not built with --with-thread-sanitizer: no sanitizer"
        "$python" setup.py --quiet build_ext --inplace
        run_both "$rounds"
        exit
        ;;
    *) runtime=$(gcc -print-file-name=libtsan.so) ;;
esac
# SA_SHOW_RACES: even short tasks go to several threads.
TSAN_OPTIONS=report_bugs=0 CFLAGS="${CFLAGS:-} -DSA_SHOW_RACES" SELFATTN_SANITIZE=thread \
    $fixed "$python" setup.py --quiet build_ext --inplace
if run tests/support/races.py planted >"$directory/planted.log" 2>&1 || ! grep -q "data race" "$directory/planted.log"; then
    cat "$directory/planted.log"
    echo "the planted race was not found"
    exit 1
fi
run_both "$rounds"
