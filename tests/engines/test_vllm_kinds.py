"""The core of the engine contract on vLLM's CPU build, for models of every kind of layer.

Each kind is one test, and each check a sub-test; one engine lives at a time. What they find is in the table of
docs/models.md: after a change that is meant, python -m pytest tests/engines/test_vllm_kinds.py --all --renew.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from gambit.engines.base import SearchSpec
from gambit.errors import EngineError, GambitWarning, UserError
from gambit.types import OnPressure, PressureAction, TraceKey
from support import ROOT
from support.engine_setups import (
    EVERYWHERE,
    GREEDY,
    HAS_VLLM,
    PROMPT,
    SAMPLED,
    finish,
    open_search,
    projection,
    run,
    spec,
    start_own_vllm,
    tokens_of,
    worker_of,
)
from support.kinds import KINDS, Kind
from support.tiny import livened, tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore::gambit.errors.GambitWarning"),
]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- vllm-kinds: begin -->", "<!-- vllm-kinds: end -->"
WIDTHS = {"head_dim": 32, "linear_key_head_dim": 64, "linear_value_head_dim": 64}  # of vLLM's kernels for CPUs
SMALL_BLOCK = 64  # tokens
CORE = ("qwen3_next", "nemotron_h", "gemma3", "gpt_oss")  # tested with every change
TRIED = (*CORE, "qwen3_5", "qwen3_moe")
VARIED = replace(SAMPLED, temperature=4.0)
QUEUE = OnPressure(PressureAction.QUEUE)
# vLLM's gated DeltaNet on a CPU knows bfloat16 alone, which not every CPU has.
BFLOAT16 = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
HAS_BFLOAT16 = "avx512_bf16" in (Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else "")


@dataclass(frozen=True)
class Bench:
    """A kind's model, in a folder and as transformers runs it."""

    name: str
    folder: Path
    reference: torch.nn.Module

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.name in BFLOAT16 else "float32"

    @property
    def tolerance(self) -> float:
        """Of the largest logit or state."""
        return 0.1 if self.dtype == "bfloat16" else 1e-4

    def start(self, **options):
        engine = start_own_vllm(model=self.folder, dtype=self.dtype, **options)
        return closing(engine)

    def check_greedy(self, tokens, prompt=PROMPT) -> None:
        """Every token is transformers' best, or as good as its best."""
        with torch.inference_mode():
            logits = self.reference(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(tokens)), list(tokens)]
        assert (logits.max(-1).values - chosen).max() <= self.tolerance * logits.abs().max()


def prepared(name: str, folder: Path) -> Bench:
    """Makes the model in widths for which vLLM has kernels on a CPU."""
    torch.manual_seed(1)
    config = KINDS[name].make().config
    for field, width in WIDTHS.items():
        if name != "gemma4" and hasattr(config, "num_key_value_heads") and getattr(config, field, None) is not None:
            setattr(config, field, width)
    torch.manual_seed(1)
    model = livened(type(KINDS[name].make())(config))
    model = model.bfloat16() if name in BFLOAT16 else model
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return Bench(name, folder, model)


def recomputed(steps) -> dict[int, int]:
    return {won.trace: won.recomputed for step in steps for won in step.admitted}


def scheduler_of(engine):
    return engine._core._client.engine_core.scheduler


# -- the checks, on an engine with room ------------------------------------------------------------------------------


def check_greedy_traces_and_their_children(bench: Bench, engine, facts: dict[str, object]) -> None:
    """From the last token, from an earlier one, and without a parent; at most a block is computed again."""
    open_search(engine, stops=())
    engine.submit([spec(0, sampling=GREEDY, tokens=150), spec(1, tokens=150)])
    run(engine, 83)
    engine.submit([
        spec(2, sampling=GREEDY, tokens=150, inherited=83, parent=TraceKey(1, 0)),
        spec(3, sampling=GREEDY, tokens=150, inherited=70, parent=TraceKey(1, 0)),
    ])  # fmt: skip
    steps = finish(engine)
    tokens = tokens_of(steps)
    engine.submit([spec(4, sampling=GREEDY, tokens=100, inherited=90, prefix=tokens[0][:90])])
    tokens |= tokens_of(finish(engine))
    facts["again"] = max(recomputed(steps).values())
    assert facts["again"] <= engine.info.block_tokens
    for trace in (0, 2, 3, 4):
        bench.check_greedy(tokens[trace])
    assert tokens[1][:20] != tokens[0][:20]
    if bench.dtype == "float32":
        assert tokens[0] == tokens[2] == tokens[3]


def check_searches_run_together_and_close_apart(bench: Bench, engine, facts: dict[str, object]) -> None:
    prompts = {1: PROMPT, 2: PROMPT[3:]}
    for number, prompt in prompts.items():
        open_search(engine, number, prompt, stops=())
        engine.submit([spec(0, search=number, sampling=GREEDY, tokens=50)])
    run(engine, 7)
    engine.close_search(1)
    bench.check_greedy(tokens_of(finish(engine, 2))[0], prompts[2])


def check_states_are_those_of_transformers(bench: Bench, engine, facts: dict[str, object]) -> None:
    kept: list[torch.Tensor] = []
    hook = bench.reference.get_output_embeddings().register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    engine.open(SearchSpec(1, PROMPT, EVERYWHERE, frozenset()))
    engine.submit([spec(i, sampling=VARIED, tokens=70) for i in range(3)])
    steps = run(engine, 45)
    engine.submit([spec(3, sampling=VARIED, inherited=45, tokens=70, parent=TraceKey(1, 0))])
    steps += finish(engine)
    tokens, checked = tokens_of(steps), set()
    for thought in (thought for step in steps for thought in step.scored):
        with torch.inference_mode():
            bench.reference(input_ids=torch.tensor([[*PROMPT, *tokens[thought.trace][: thought.num_tokens]]]))
        state = kept[-1][0, -1].float()
        assert (
            abs(thought.score - float(state @ projection(32))) <= bench.tolerance * (1 + float(state.abs().max())) * 6
        )
        checked.add(thought.trace)
    hook.remove()
    assert 3 in checked and len(checked) > 2


# -- the checks, on an engine with a small budget and asynchronous scheduling -----------------------------------------


def check_ghosts_free_their_memory(bench: Bench, engine, facts: dict[str, object]) -> None:
    open_search(engine, stops=())
    engine.submit([spec(i, tokens=120) for i in range(8)])
    steps = finish(engine)
    evicted = {loss.trace for step in steps for loss in step.evicted}
    assert evicted | set(tokens_of(steps)) == set(range(8))
    assert evicted or engine.info.block_tokens > SMALL_BLOCK, "a trace that stays in its first block needs no other"
    engine.close_search(1)
    assert scheduler_of(engine)._num_used_blocks() == 0


def check_queued_traces_come_back_as_they_were(bench: Bench, engine, facts: dict[str, object]) -> None:
    open_search(engine, stops=())
    engine.submit([spec(i, sampling=GREEDY, tokens=110, on_pressure=QUEUE) for i in range(6)])
    run(engine, 40)
    engine.submit([spec(6, sampling=GREEDY, tokens=110, on_pressure=QUEUE, inherited=39, parent=TraceKey(1, 0))])
    steps = finish(engine, most=3000)
    tokens = tokens_of(steps)
    assert set(tokens) == set(range(7))
    assert any(step.evicted for step in steps) or engine.info.block_tokens > SMALL_BLOCK
    for each in set(tokens.values()):
        bench.check_greedy(each)
    engine.close_search(1)
    assert scheduler_of(engine)._num_used_blocks() == 0


ROOMY = (check_greedy_traces_and_their_children, check_searches_run_together_and_close_apart,
         check_states_are_those_of_transformers)  # fmt: skip
TIGHT = (check_ghosts_free_their_memory, check_queued_traces_come_back_as_they_were)
ROWS: dict[str, str] = {}


@pytest.fixture(params=TRIED)
def name(request):
    if not (request.param in CORE or request.config.getoption("--all")):
        pytest.skip("runs every week: --all runs it now")
    if request.param in BFLOAT16 and not HAS_BFLOAT16:
        pytest.skip("gated DeltaNet needs a CPU with bfloat16 in vLLM")
    return request.param


@pytest.fixture(autouse=True)
def expert_group(monkeypatch):
    """Gives vLLM a group of experts where another engine in this process has made its groups without one."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
        monkeypatch.setattr(parallel_state, "_EP", parallel_state._TP)


def test_the_contract_holds_for_models_of_each_kind(name, tmp_path, subtests):
    kind = KINDS[name]
    facts: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GambitWarning)
        try:
            bench = prepared(name, tmp_path)
            with bench.start(self_check=True) as engine:
                from vllm.model_executor.models.interfaces import supports_eagle3

                facts["inner"] = supports_eagle3(worker_of(engine).model_runner.get_model())
                facts["short"] = scheduler_of(engine)._fast_decode is not None
                _check_all(ROOMY, bench, engine, facts, subtests)
        except (EngineError, UserError) as refusal:
            ROWS[name] = _row(kind, f"refused: {_sentence(refusal)}")
            assert name not in CORE, refusal
            return
        block_tokens = engine.info.block_tokens
        rooms = 14 if block_tokens <= SMALL_BLOCK else 8  # a trace holds one block of each kind at least
        with bench.start(kv_budget_tokens=rooms * block_tokens, async_scheduling=True) as tight:
            _check_all(TIGHT, bench, tight, facts, subtests)
    short, inner = ("yes" if facts[each] else "no" for each in ("short", "inner"))
    dtype = ", `--dtype bfloat16`" if name in BFLOAT16 else ""
    ROWS[name] = _row(kind, f"yes{dtype}", f"{facts['again']} of 83", short, inner)


def _check_all(checks: tuple[Callable[..., None], ...], bench: Bench, engine, facts, subtests) -> None:
    for check in checks:
        with subtests.test(check.__name__):
            check(bench, engine, facts)
        for number in list(engine._searches):
            engine.close_search(number)


# -- the table -------------------------------------------------------------------------------------------------------


def _row(kind: Kind, runs: str, again: str = "", short: str = "", inner: str = "") -> str:
    return f"| {kind.models} | {kind.layers} | {runs} | {again} | {short} | {inner} |"


def _sentence(error: Exception) -> str:
    """Returns the reason in short: the message's last part says where vLLM's own log has more."""
    text = str(error).removeprefix("vLLM failed: ").removeprefix("vLLM does not start: ").partition("\n")[0]
    text = text.rpartition("Value error, ")[2].partition(". ")[0][:120]
    return re.sub(r"Model architectures \['(\w+)'\] failed to be inspected", r"vLLM cannot load `\1` here", text)


def test_the_table_has_what_was_found(request):
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = [ROWS[name] for name in TRIED if name in ROWS]
    if request.config.getoption("--renew"):
        head = "| models | layers | runs | computed again at a branch | short cuts | scorers of inner layers |"
        head += "\n|---|---|---|---|---|---|"
        PAGE.write_text("\n".join([f"{before}{BEGIN}", head, *rows, f"{END}{after}"]), encoding="utf-8")
        return
    missing = [row for row in rows if row not in table]
    assert not missing, "run this file with --all --renew"
