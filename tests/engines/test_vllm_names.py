"""The list of what Gambit uses of vLLM: complete, true of the installed version, in the docs; none outside `compat`."""

import ast
import contextlib
import functools
import logging
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from scripts import vllm_names
from scripts.vllm_touched import TOUCHED, VERSIONS, Touched

from gambit.engines.vllm import installed

SOURCE = vllm_names.ROOT / "src" / "gambit"
COMPAT = sorted(vllm_names.COMPAT.glob("*.py"))
OUTSIDE = sorted(set(SOURCE.rglob("*.py")) - set(COMPAT))
LIBRARIES = (
    dict, list, set, str, tuple, torch, torch.Tensor, torch.dtype, np, np.ndarray, time, queue, queue.Queue, logging,
    logging.Logger, functools, multiprocessing, os, signal, sys, threading,
    contextlib.ExitStack,
)  # fmt: skip


def defined_here():
    """Fields, methods and functions of Gambit's own."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
                yield from vllm_names._class_names(node) if isinstance(node, ast.ClassDef) else ()
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif (
                isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and vllm_names._is_self(node.value)
            ):
                yield node.attr


OURS = set(defined_here())
OF_LIBRARIES = {name for library in LIBRARIES for name in dir(library)}
OF_OTHERS = {
    "num_hidden_layers",
    "architectures",
    "auto_map",
    "pooling",
    "gambit_forest",
    "auto",
}  # transformers' and ours


def attributes(files):
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                yield node.attr


def test_every_name_that_compat_uses_is_listed():
    used = vllm_names.used_names(COMPAT)
    unknown = used.keys() - vllm_names.declared_uses().keys() - OURS - OF_LIBRARIES - OF_OTHERS
    assert not unknown, "list them in scripts/vllm_touched.py, by the class of vLLM that has them"


def test_every_listed_name_is_used_as_listed():
    used = vllm_names.used_names(COMPAT)
    declared = vllm_names.declared_uses()
    wrong = {name: (uses, used.get(name)) for name, uses in declared.items() if not uses <= used.get(name, set())}
    assert not wrong, "declared and found"
    # A name that Gambit's own classes or a library's have too may be used in more ways.
    alone = declared.keys() - OURS - OF_LIBRARIES
    more = {name: used[name] - declared[name] for name in alone if not used[name] <= declared[name]}
    assert not more, "found, not declared"


def test_nothing_outside_compat_imports_vllm_or_touches_its_objects():
    for file in OUTSIDE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in modules if name.partition(".")[0] == "vllm"], file
    used = set(attributes(file for file in OUTSIDE if "engines/vllm" in file.as_posix()))
    assert not used & vllm_names.declared_uses().keys() - OURS - OF_LIBRARIES


def test_the_scan_finds_what_it_is_for(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("from vllm.v1.request import Request\nx.running += 1\nx.call_me(getattr(x, 'hidden'))\n"
                    "class S(Scheduler):\n    def schedule(self):\n        super().base_call()\n")  # fmt: skip
    assert vllm_names.used_names([file]) == {
        "Request": {"imported"}, "running": {"read", "set"}, "call_me": {"called"}, "hidden": {"read"},
        "schedule": {"overridden"},
    }  # fmt: skip


def test_what_only_short_cuts_and_forest_attention_need_is_not_imported_without_them():
    """A version that was not tried may lack such a name."""
    for file in COMPAT:
        if file.stem in vllm_names.OPTIONAL:
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                imported = {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not imported & vllm_names.OPTIONAL.keys(), f"{file.name} imports them whenever it is imported"


def test_a_name_that_moved_is_listed_with_what_needs_it(tmp_path):
    moved = {line.partition(" is not in vLLM 9.9 ")[::2] for line in vllm_names.wrong_names(tmp_path, "9.9")}
    assert ("vllm.v1.request.Request.num_in_flight_tokens", "(short cuts)") in moved
    assert ("vllm.v1.request.Request.priority", "(needed everywhere)") in moved
    assert ("vllm.config.compilation.CUDAGraphMode.FULL", "(forest attention)") in moved
    assert not any("async_tokens_to_discard" in name for name, _ in moved), "not in the newest listed version either"


INSTALLED = (installed() or (None,))[0]


@pytest.mark.skipif(INSTALLED not in VERSIONS, reason="none of the listed vLLM versions is installed")
def test_every_listed_name_is_in_the_installed_version(monkeypatch):
    source = Path(find_spec("vllm").origin).parent
    assert vllm_names.wrong_names(source, INSTALLED) == []
    gone = Touched("vllm.v1.request", "Request", read="request_id no_such_field")
    monkeypatch.setattr(vllm_names, "TOUCHED", (gone,))
    (line,) = vllm_names.wrong_names(source, INSTALLED)
    assert line.startswith("vllm.v1.request.Request.no_such_field is not in vLLM")


def test_the_table_in_the_docs_is_that_of_the_list():
    page = vllm_names.PAGE.read_text(encoding="utf-8")
    assert vllm_names.renewed(page) == page, "run scripts/vllm_names.py"
    assert len(TOUCHED) == sum(line.startswith("| `vllm") for line in vllm_names.table().splitlines())
