"""Firefox for the tests of pages, driven by WebDriver BiDi."""

import json
import os
import re
import shutil
import subprocess
import time

import pytest

FIREFOX = os.environ.get("FIREFOX") or shutil.which("firefox-esr") or shutil.which("firefox")
needed = pytest.mark.skipif(FIREFOX is None, reason="there is no Firefox")

# What a page has drawn: ribbons with a path, maps with a size, the links of the start page.
DRAWN = """[...document.querySelectorAll(
        ".sa-ribbons path.sa-strong, .sa-thumb canvas, .sa-card, [data-computed], .sa-teacher a")]
    .filter((drawn) =>
    drawn.getAttribute("d")?.length > 20 || drawn.width > 1 || drawn.href || drawn.dataset.computed).length"""


@pytest.fixture
def bidi(tmp_path):
    """Start Firefox; return a function that sends a command and returns its result, and the list of events."""
    websocket = pytest.importorskip("websocket", reason="Firefox is driven with websocket-client")
    command = [
        FIREFOX,
        *["--headless", "--no-remote", "--remote-debugging-port", "0", "--profile"],
        str(tmp_path),
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    address = next(
        found[1] for line in process.stderr if (found := re.search(r"BiDi listening on (ws://\S+)", line))
    )
    socket, events = websocket.create_connection(f"{address}/session", timeout=60, suppress_origin=True), []

    def send(method, **params):
        socket.send(json.dumps({"id": 1, "method": method, "params": params}))
        while "id" not in (answer := json.loads(socket.recv())):
            events.append(answer)
        assert answer["type"] == "success", answer
        return answer["result"]

    send("session.new", capabilities={})
    yield send, events
    send("browser.close")
    process.wait(30)


def assert_shown(bidi, paths):
    """Each page draws something, and no script of it says anything but information."""
    send, events = bidi
    send("session.subscribe", events=["log.entryAdded"])
    context = send("browsingContext.getTree")["contexts"][0]["context"]
    for path in paths:
        send("browsingContext.navigate", context=context, url=path.as_uri(), wait="complete")
        for _ in range(50):
            drawn = send(
                "script.evaluate", expression=DRAWN, target={"context": context}, awaitPromise=False
            )["result"]["value"]
            if drawn:
                break
            time.sleep(0.1)
        assert drawn, path.name
    assert [event for event in events if event["params"]["level"] != "info"] == []
