#!/usr/bin/env bash
# Does what a newcomer does: clones, runs the README's commands, imports inside and outside of the clone. Checks the sdist;
# tools/check_wheel.py checks a wheel.
#
#   tools/check_fresh_clone.sh               the last commit
#   tools/check_fresh_clone.sh --worktree    the files here, committed or not
#   ... --no-tests                           without the tests
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
worktree=no tests=yes
for argument in "$@"; do
    case $argument in
        --worktree) worktree=yes ;;
        --no-tests) tests=no ;;
        *) echo "usage: $0 [--worktree] [--no-tests]" >&2; exit 2 ;;
    esac
done
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV SELFATTN_ISA
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
step() { printf '\n=== %s (%s)\n' "$1" "$(date +%T)"; }

step "clone"
if [ "$worktree" = yes ]; then
    mkdir "$directory/clone"
    git -C "$repository" ls-files -z --cached --others --exclude-standard |
        (cd "$repository" && xargs -0 -I{} find {} -maxdepth 0 -print0 2>/dev/null) |
        tar -C "$repository" --null -T - -cf - | tar -C "$directory/clone" -xf -
else
    git clone -q "$repository" "$directory/clone"
fi
cd "$directory/clone"

# The first code block below a heading of the README.
command_below() {
    awk -v heading="## $1" \
        '$0 == heading {found = 1} found && /^```/ {n++; next} n == 1 {print} n == 2 {exit}' README.md
}
run_as_written() {
    local command
    command=$(command_below "$1")
    [ -n "$command" ] || { echo "README.md has no command below '## $1'" >&2; exit 1; }
    printf '$ %s\n' "$command"
    bash -euo pipefail -c "$command"
}

step "the README's command that shows the main job"
run_as_written "Try it"
.venv/bin/pip check

step "import from the clone, which holds a folder of that name, and from elsewhere"
check='import numpy as np, selfattn as sa, selfattn.cli
x = np.eye(4, dtype=np.float32)
out = sa.scaled_dot_product_attention(x, x, x)
assert out.shape == (4, 4) and abs(out.sum() - 4) < 1e-6
print(sa.__version__, sa.get_isa(), sa.__file__)'
.venv/bin/python -c "$check"
(cd / && "$directory/clone/.venv/bin/python" -c "$check" | tee "$directory/where")
grep -q site-packages "$directory/where"
(cd / && "$directory/clone/.venv/bin/selfattn" info)
installed=$(.venv/bin/pip list --format=freeze --exclude pip --exclude setuptools --exclude wheel |
    cut -d= -f1 | sort | xargs)
[ "$installed" = "numpy selfattn" ] || { echo "pip install brought: $installed" >&2; exit 1; }

step "sdist"
python3 -m venv "$directory/build"
"$directory/build/bin/pip" install -q 'setuptools>=77' 'numpy>=2.0'
"$directory/build/bin/python" -c \
    "from setuptools import build_meta; import sys; build_meta.build_sdist(sys.argv[1])" "$directory/sdist" >/dev/null
tar -tzf "$directory"/sdist/*.tar.gz | cut -d/ -f2- | sort >"$directory/packed"
git -C "$repository" ls-files setup.py pyproject.toml LICENSE README.md selfattn 'csrc/*.[ch]' ':!csrc/tests' ':!*.md' ':!*/tsconfig.json' |
    sort | comm -23 - "$directory/packed" >"$directory/lacking"
! command -v wasm-ld-14 >/dev/null || grep -x selfattn/views/data/selfattn.wasm "$directory/packed" >/dev/null ||
    echo selfattn/views/data/selfattn.wasm >>"$directory/lacking"
[ ! -s "$directory/lacking" ] || { echo "the sdist lacks:" "$(cat "$directory/lacking")" >&2; exit 1; }
"$directory/build/bin/pip" install -q "$directory"/sdist/*.tar.gz
(cd / && "$directory/build/bin/python" -c "$check")

if [ "$tests" = yes ]; then
    step "the README's command that passes the tests"
    rm -rf .venv
    run_as_written "Test it"
    # now an editable install
    (cd / && "$directory/clone/.venv/bin/python" -c "$check")
fi
if [ "$worktree" = no ] && [ -n "$(git status --porcelain)" ]; then
    echo "the commands leave files that git sees:" >&2
    git status --short >&2
    exit 1
fi
step "fresh clone: all checks passed"
