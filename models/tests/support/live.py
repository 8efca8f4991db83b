"""Scripts of live pages under node: what a browser does not need to be asked."""

import json
import shutil
import subprocess

import pytest
from page_driver import then

from selfattn_models.pages.texts import own

TOKENIZERS = own("live/tokenizers.js")


def run(scripts, body, given=None, memory=None):
    """Run ``body``, an async function's, after scripts of a page; it gets ``given`` and returns what JSON can hold."""
    node = shutil.which("node") or pytest.skip("there is no node")
    main = f"(async (given) => {{{body}}})(JSON.parse(require('fs').readFileSync(0)))"
    code = then(scripts, f"{main}.then((found) => process.stdout.write(JSON.stringify(found) ?? 'null'));")
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
