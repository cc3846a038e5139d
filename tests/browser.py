"""A headless Chromium, driven over its own debugging port: what tests of pages stand on.

The protocol is Chrome's DevTools protocol (https://chromedevtools.github.io/devtools-protocol): JSON over a
websocket. Nothing is downloaded: the browser is the one that is installed, or there is none.
"""

import base64
import json
import subprocess
import time
from pathlib import Path


class Browser:
    """One browser, one tab at a time. `errors`: console errors and exceptions since `open`; `requests`: every
    address asked for since `open`."""

    def __init__(self, program: str, profile: Path):
        import websocket  # websocket-client

        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--remote-allow-origins=*"]
        flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
        self.process = subprocess.Popen([program, *flags, "about:blank"], stderr=subprocess.DEVNULL)
        port, path = self._wait(lambda: (profile / "DevToolsActivePort").read_text().split())
        self.socket = websocket.create_connection(f"ws://127.0.0.1:{port}{path}", timeout=60)
        self.count, self.session, self.tab = 0, None, None
        self.width, self.height = 1280, 900
        self.errors: list[str] = []
        self.requests: list[str] = []

    def _wait(self, ready, seconds: float = 60):
        """The value of `ready()` as soon as it is true and raises no OSError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if value := ready():
                    return value
            except OSError:
                pass
            if self.process.poll() is not None:
                raise RuntimeError(f"the browser ended with code {self.process.returncode}")
            time.sleep(0.05)
        raise TimeoutError("the browser did not answer in time")

    def call(self, method: str, **parameters) -> dict:
        """Send one command and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while (answer := self._receive()).get("id") != self.count:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict:
        message = json.loads(self.socket.recv())
        event, what = message.get("method"), message.get("params", {})
        if event == "Runtime.exceptionThrown":
            details = what["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and what["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(arg.get("value", arg)) for arg in what["args"]))
        elif event == "Log.entryAdded" and what["entry"]["level"] == "error":
            self.errors.append(f"{what['entry']['text']} {what['entry'].get('url', '')}")
        elif event == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])
        return message

    def size(self, width: int, height: int) -> None:
        """The size of the next tab in CSS pixels; narrow ones count as a phone."""
        self.width, self.height = width, height

    def open(self, address: str, ready: str = "document.readyState === 'complete'", calm=False) -> None:
        """Show an address in a new tab and wait until the expression `ready` is true there. calm: for
        a reader who wants less motion."""
        self.session = None
        if self.tab:
            self.call("Target.closeTarget", targetId=self.tab)
        self.tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=self.tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=self.width, height=self.height,
                  deviceScaleFactor=1, mobile=self.width < 600)  # fmt: skip
        if calm:
            reduced = {"name": "prefers-reduced-motion", "value": "reduce"}
            self.call("Emulation.setEmulatedMedia", features=[reduced])
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=address)
        self._wait(lambda: self.run(f"location.href !== 'about:blank' && !!({ready})"))

    def run(self, expression: str):
        """The value of a JavaScript expression (a promise is awaited)."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
        self.process.wait()
        self.socket.close()
