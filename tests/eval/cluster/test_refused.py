"""What is refused before Ray is started: one line each."""

import socket
import sys

import pytest

from eval.cluster import pool
from eval.core.errors import Problem


def test_ray_that_is_not_installed(refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert refused("accuracy", "--on", "ray").endswith('pip install "kvlab[ray]"')


def test_an_address_that_nobody_answers(monkeypatch):
    monkeypatch.setattr(pool, "needs", lambda name: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Problem, match="no answer from"):
            pool.place(f"ray:{address}")
        free.listen()
        assert pool.place(f"ray:{address}") == address
    for wrong in ("ray:here", "ray:here:port", "ray:here:99999", "ray://here:10001"):
        with pytest.raises(Problem, match="HOST:PORT"):
            pool.place(wrong)
