"""The live page in Firefox says what it says in Chromium: the same tokens, by another engine of JavaScript.

Firefox is driven over WebDriver BiDi (https://www.w3.org/TR/webdriver-bidi): JSON over a websocket.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time

import pytest

import kvlab
from course.page import build

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")
METHODS = ("full", "int2", "h2o", "snapkv", "topk", "infinigen")
ASK = """(async () => {
  const found = [];
  for (const method of METHODS) {
    const given = {facts: START.facts, question: QUESTION + START.question, protocol: START.protocol};
    const {found: run} = await client.ask('run', {...given, method, budget: 0.4, evicted: [3]});
    found.push(run.answer.join());
  }
  return found.join(' ');
})()"""


class Firefox:
    """A headless Firefox with one tab."""

    def __init__(self, folder):
        import websocket  # websocket-client

        log = folder / "log"
        command = [
            FIREFOX,
            "--headless",
            "--no-remote",
            "--profile",
            str(folder),
            "--remote-debugging-port=0",
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen([*command, "about:blank"], stdout=out, stderr=out)
        end, found = time.monotonic() + 60, None
        while not (found := re.search(r"ws://127\.0\.0\.1:\d+", log.read_text())):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"Firefox does not answer: {log.read_text()[-500:]}")
            time.sleep(0.1)
        self.socket = websocket.create_connection(f"{found[0]}/session", timeout=120, suppress_origin=True)
        self.count = 0
        self.call("session.new", capabilities={})
        self.tab = self.call("browsingContext.getTree")["contexts"][0]["context"]

    def call(self, method: str, **parameters) -> dict:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.count:
            pass
        if answer["type"] == "error":
            raise RuntimeError(f"{method}: {answer['message']}")
        return answer["result"]

    def open(self, address: str) -> None:
        self.call("browsingContext.navigate", context=self.tab, url=address, wait="complete")

    def run(self, expression: str) -> str:
        """The value of an expression whose value is a string, or a promise of one."""
        target = {"context": self.tab}
        got = self.call("script.evaluate", expression=expression, target=target, awaitPromise=True)
        assert got["type"] == "success", got
        return got["result"]["value"]

    def close(self) -> None:
        self.socket.close()
        self.process.terminate()
        self.process.wait(20)


@pytest.mark.slow
def test_firefox_says_the_same_tokens(browser, tmp_path):
    if FIREFOX is None:
        pytest.skip("no Firefox is installed")
    file = tmp_path / "page.html"
    file.write_text(build.page(*kvlab.load()), encoding="utf-8")
    ask = ASK.replace("METHODS", json.dumps(METHODS))
    (tmp_path / "profile").mkdir()
    browser.open(file.as_uri(), ready="typeof shown !== 'undefined' && shown && !busy")
    wanted = browser.run(ask)
    firefox = Firefox(tmp_path / "profile")
    try:
        firefox.open(file.as_uri())
        assert firefox.run("ready.then(({found}) => String(found.simd))") == "true"
        assert firefox.run(ask) == wanted
        said = firefox.run("change({}).then(() => $('answer').textContent + ' ' + $('verdict').textContent)")
        assert said == browser.run("$('answer').textContent + ' ' + $('verdict').textContent")
    finally:
        firefox.close()
