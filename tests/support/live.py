"""Scripts of live pages under node: what a browser does not need to be asked."""

import json
import shutil
import subprocess

import pytest

from selfattn.views import document

READERS = ("compute.js", "live/readers.js")
TOKENIZERS = (*READERS, "live/tokenizers.js")


def run(scripts, body, given=None, memory=None):
    """Run ``body``, an async function's, after the scripts as pages have them; it gets ``given`` and returns what JSON can hold."""
    node = shutil.which("node") or pytest.skip("there is no node")
    code = document.code(*scripts).removesuffix("})();")
    main = f"(async (given) => {{{body}}})(JSON.parse(require('fs').readFileSync(0)))"
    code += f"{main}.then((found) => process.stdout.write(JSON.stringify(found) ?? 'null'));}})();"
    limits = [f"--max-old-space-size={memory}"] if memory else []
    done = subprocess.run(
        [node, *limits, "--eval", code],
        input=json.dumps(given).encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return json.loads(done.stdout)
