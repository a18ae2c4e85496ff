"""Fixtures shared by all tests: a tiny model, and the material next to the repository where it is there."""

import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing may be downloaded
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: two threads waiting for each other are slower than one

import hypothesis
import pytest

from support import ROOT

# Nothing is timed in tests: these machines are shared. No example of a slow or an interrupted run is kept either.
# The same examples every time: what fails has failed for the change at hand.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
# To look for new examples: pytest --hypothesis-profile=explore, or `long` for ten times as many (`make test-all`).
hypothesis.settings.register_profile("explore", hypothesis.settings.get_profile("untimed"), derandomize=False)
hypothesis.settings.register_profile("long", hypothesis.settings.get_profile("explore"), max_examples=1000)
# For mutation testing (scripts/mutants.py): the same few examples every time, a failing one not made smaller.
hypothesis.settings.register_profile(
    "quick",
    hypothesis.settings.get_profile("untimed"),
    max_examples=25,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("untimed")

# ../shared next to the repository, or further up where this is a git worktree of it
SHARED = next((folder / "shared" for folder in ROOT.parents if (folder / "shared").is_dir()), ROOT.parent / "shared")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run also what is tested every week alone")
    parser.addoption("--renew", action="store_true", help="write what the tests of this file compare with anew")


# The tier of a test follows from a mark on it or on its module, else from its folder, else from what it runs on.
TIERS = ("unit", "contract", "system")
SYSTEM, CONTRACT = ("cli", "cluster", "serve"), ("engines", "verifiers")  # folders
MODELS = {"gate", "pawn_solver", "tiny_folder"}


def tier_of(item: pytest.Item) -> str:
    for mark in item.iter_markers():
        if mark.name in TIERS:
            return mark.name
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    if folder in SYSTEM:
        return "system"
    return "contract" if folder in CONTRACT or MODELS & {*getattr(item, "fixturenames", ())} else "unit"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_weekly = config.getoption("--all")
    for item in items:
        item.add_marker(tier_of(item))
        if item.get_closest_marker("weekly") and not is_weekly:
            item.add_marker(pytest.mark.skip(reason="takes minutes: --all runs it, as `make test-all` does"))


@pytest.fixture(autouse=True)
def _no_language_model(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a unit test that runs a language model. These have an embedding, the networks of scorers have none."""
    if request.node.get_closest_marker("unit") is None or "torch" not in sys.modules:
        yield
        return
    import torch

    def refuse(module: torch.nn.Module, _: object) -> None:
        if isinstance(module, torch.nn.Embedding):
            raise AssertionError(f"{request.node.nodeid} runs a language model: mark it `contract` or `system`")

    with torch.nn.modules.module.register_module_forward_pre_hook(refuse):
        yield


# What takes longest, by file or page of the docs, begins first: else one worker has it alone in the end.
LONGEST = ("vllm", "ray", "test_vllm_model_runner_v2", "scorers.md", "prefix-value.md", "cluster.md", "test_grader",
           "test_spread", "test_kills", "test_answer_fuzz")  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):  # type: ignore[no-untyped-def] # xdist has no types
    """A file's tests share its fixtures in one worker; so do files that share the Ray cluster, or vLLM's engines.

    The pages of the docs share nothing. Groups of xdist 3.8 are lost on pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    of_cluster = {path.stem for path in ROOT.glob("tests/*/test_*.py") if "ray_cluster" in path.read_text()}
    of_vllm = {path.stem for path in ROOT.glob("tests/*/test_vllm_*.py")}
    of_vllm |= {"test_engine_contract", "test_engine_histories"}
    of_vllm -= {"test_vllm_model_runner_v2"}  # it starts a process of its own

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem
            if name == "test_docs":
                return nodeid
            return "ray" if name in of_cluster else "vllm" if name in of_vllm else name

        def _assign_work_unit(self, node):  # type: ignore[no-untyped-def]
            longest = [scope for name in LONGEST for scope in self.workqueue if scope == name or f"[{name}]" in scope]
            if longest:
                self.workqueue.move_to_end(longest[0], last=False)
            super()._assign_work_unit(node)

    return LongestFirst(config, log)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """What a test, or the code it calls, sets in the environment ends with it: the next one may start an engine."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that `--model` takes."""
    from support.tiny import save_tiny  # torch and transformers take seconds, which most unit tests do without

    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pawn_solver():  # type: ignore[no-untyped-def] # importing it takes its time
    """The bundled model, loaded once for all who only ask it."""
    from gambit.solver import Solver

    with Solver("pawn") as solver:
        yield solver


@pytest.fixture
def gate(pawn_solver):  # type: ignore[no-untyped-def] # as above
    """Lets pawn's engine take as many steps as a test allows."""
    from support.serving import Gate

    gate = Gate(pawn_solver.engine)
    yield gate
    gate.remove()


@pytest.fixture(scope="session")
def ray_cluster():  # type: ignore[no-untyped-def] # as above
    """Ray with three nodes of one core each, which this process is a driver of."""
    from gambit.cluster.plan import SETTINGS

    os.environ.update(SETTINGS, RAY_worker_niceness="0")  # else engines starve beside the other worker's tests
    import ray
    from ray.cluster_utils import Cluster

    quick = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_timeout_ms": 1000}
    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    head = {**node, "include_dashboard": False, "_system_config": {**quick, "health_check_failure_threshold": 3}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    return _existing(SHARED / "data")


@pytest.fixture(scope="session")
def shared_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = _existing(SHARED / "tokenizers" / "tokenizers.tar.xz")
    folder = tmp_path_factory.mktemp("tokenizers")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


def _existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"needs {path.name}, which lies beside a maintainer's clone and not in the repository")
    return path
