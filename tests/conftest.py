"""What every test stands on: offline, one thread, repeatable, and no way to the network.

The environment is set before torch, transformers or datasets are imported anywhere.
"""

import gc
import ipaddress
import os
import socket
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
if os.environ.get("KVLAB_WITHOUT_FAST"):  # the whole suite passes without compiled code, too
    sys.modules["kvlab.fast"] = None
    collect_ignore = ["fast"]
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports triton

settings.register_profile("kvlab", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("kvlab")


def pytest_collection_finish(session):
    """What was imported stays: nobody looks for garbage in it at every test."""
    gc.collect()
    gc.freeze()


class NetworkAccess(RuntimeError):
    """A test tried to reach another machine. Not an OSError, so that no retry swallows it."""


def is_local(host: str | bytes | None) -> bool:
    """Is this name or address this machine's own?"""
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def refuse_others(family: int, address: object) -> None:
    """Raise unless the address is local; other families (Unix sockets) stay on the machine."""
    if family in (socket.AF_INET, socket.AF_INET6) and not is_local(address[0]):
        raise NetworkAccess(f"tests must not use the network: {address!r}")


@pytest.fixture(autouse=True, scope="session")
def no_network():
    """Every socket refuses every address but this machine's, name look-ups included."""
    original_connect, original_connect_ex = socket.socket.connect, socket.socket.connect_ex
    original_getaddrinfo = socket.getaddrinfo

    def connect(self, address):
        refuse_others(self.family, address)
        return original_connect(self, address)

    def connect_ex(self, address):
        refuse_others(self.family, address)
        return original_connect_ex(self, address)

    def getaddrinfo(host, *args, **kwargs):
        if not is_local(host):
            raise NetworkAccess(f"tests must not use the network: {host!r}")
        return original_getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect)
        patch.setattr(socket.socket, "connect_ex", connect_ex)
        patch.setattr(socket, "getaddrinfo", getaddrinfo)
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """The installed Chromium, headless (see browser.py). Where there is none its tests skip, or fail if
    KVLAB_NEED_BROWSER is set, as in CI."""
    from browser import Browser

    from course.pdf import find

    program = find()
    if program is None:
        told = "no Chromium or Chrome is installed: pages are not looked at (make browser)"
        pytest.fail(told) if os.environ.get("KVLAB_NEED_BROWSER") else pytest.skip(told)
    opened = Browser(program, tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
